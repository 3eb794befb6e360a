"""Compiles Triton kernels for GPUs that are not there, exactly as the launching functions would launch them.

    python -m tests.unit.kernels.cross_compile 75 80 90     one JSON line for each kernel: its name and shared memory

Runs in a process of its own: TRITON_INTERPRET, which other tests set, must be off before Triton is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource

from labkit.kernels import (
    activation,
    decode_attention,
    draw,
    expand,
    invariant_linear,
    launch,
    linear,
    norm_linear,
    prefill_attention,
    qkv_rope,
    rms_norm,
    tiles,
)

from .draws import Wishes, parameters

LIMITS = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes of shared memory a program may have
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
TYPES[torch.bool] = "i1"
OPTIONS = ("num_stages", "launch_pdl", "maxnreg")


class Compiled:
    """In place of a kernel: compiles what is launched, and launches nothing."""

    def __init__(self, kernel: Any, capability: int, report: Callable[[str, int], None]):
        self.kernel, self.capability, self.report = kernel, capability, report

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, num_warps: int = 4, **given: Any) -> None:
        options = {"num_warps": num_warps} | {name: given.pop(name) for name in OPTIONS if name in given}
        names = self.kernel.arg_names
        values = dict(zip(names, args, strict=False)) | given
        signature, attributes, constants = {}, {}, {}
        for index, name in enumerate(names):
            value = values[name]
            signature[name] = "constexpr" if self.kernel.params[index].is_constexpr else type_of(value)
            if signature[name] == "constexpr":
                constants[name] = value
            elif self.kernel.params[index].do_not_specialize:
                continue
            elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = BaseBackend.parse_attr("D")
        source = ASTSource(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        assert compiled.asm["cubin"]
        assert ("griddepcontrol" in compiled.asm["ptx"]) == options.get("launch_pdl", False)
        self.report(self.kernel.__name__, compiled.metadata.shared)


def type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i64" if abs(value) >= 1 << 31 else "i32"


@contextmanager
def compiling_for(capability: int, where: str) -> Iterator[None]:
    """Every launch within compiles for this chip and prints a line."""

    def report(kernel: str, shared: int) -> None:
        row = dict(kernel=kernel, case=where, capability=capability, shared=shared, limit=LIMITS[capability])
        print(json.dumps(row), flush=True)

    chip = (capability >= 80, LIMITS[capability])
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(tiles, "_chip", lambda device: chip))
        stack.enter_context(mock.patch.object(launch, "_can_launch_early", lambda device: capability >= 90))
        for module in (
            decode_attention,
            prefill_attention,
            qkv_rope,
            rms_norm,
            activation,
            linear,
            norm_linear,
            invariant_linear,
            draw,
            expand,
        ):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                kernel = Compiled(getattr(module, name), capability, report)
                stack.enter_context(mock.patch.object(module, name, kernel))
        yield


def launch_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    pool = torch.zeros(4, 16, kv_heads, head_dim, dtype=dtype)
    qkv = torch.zeros(2, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    ints, norm = torch.ones(2, dtype=torch.int32), torch.ones(head_dim, dtype=dtype)
    table = torch.zeros(8, head_dim)
    q = qkv_rope.norm_rope_store_triton(qkv, ints, table, pool, pool, ints.long(), norm, norm)
    tables = torch.zeros(2, 4, dtype=torch.int32)
    decode_attention.decode_attention_triton(q, pool, pool, tables, ints, 64)
    decode_attention.decode_attention_triton(q, pool, pool, tables, ints, 64, window=20, splits=1)
    group = heads // kv_heads
    tile = tiles.prefill_tile(dtype, head_dim, group, q.device)
    if tile is not None:
        prompts = prefill_attention.make_prompts(tile, group, 2, tables, ints, ints)
        prefill_attention.prefill_attention_triton(q, pool, pool, prompts, window=20)


def launch_expand() -> None:
    rows, tables = torch.zeros(5, 3, dtype=torch.int32), torch.zeros(4, 9, dtype=torch.int32)
    expand._expand_decodes_triton(rows, tables, tables[:, 0], 16, 7)


def launch_pointwise(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    rms_norm.rms_norm_triton(x, weight, 1e-6)
    rms_norm.rms_norm_triton(torch.zeros(3, 4, 80, dtype=dtype), weight[:80], 1e-6)
    rms_norm.add_rms_norm_triton(x, x, weight, 1e-6)
    activation.silu_mul_triton(x)
    linear.gemv(x, x)
    norm_linear.norm_linear_triton(x[:2], x[:2], weight, 1e-6, x, weight[:3])
    norm_linear.norm_linear_triton(None, x[:1, :576], weight[:576], 1e-6, x[:2, :576].contiguous(), gated=True)
    invariant_linear.invariant_linear(x, x, weight[:3])
    invariant_linear.invariant_linear(torch.zeros(100, 80, dtype=dtype), torch.zeros(7, 80, dtype=dtype))
    if tiles.has_room(x.device, linear.FEW_SHARED):
        linear.few_rows(x, x, weight[:3])
        linear.few_rows(x[:, :576], torch.zeros(7, 576, dtype=dtype))
    linear.gemv(x[:1, :576], torch.zeros(7, 576, dtype=dtype), weight[:7])
    linear.gemv(torch.zeros(8, 14336, dtype=dtype), torch.zeros(1, 14336, dtype=dtype))


def launch_sampling(dtype: torch.dtype, device: str = "cpu") -> None:
    rows = [Wishes(), Wishes(top_k=50), Wishes(top_k=400, top_p=0.9), Wishes(top_p=0.9)]
    table, slots = parameters(rows, device), torch.arange(len(rows), dtype=torch.int32)
    logits, counts = (torch.zeros(len(rows), 151_936, dtype=kind) for kind in (dtype, torch.int32))
    logits[:, :100] = 5  # those 100 are compared each with each for top_k=50; the other two rows are flat
    draw.draw(logits, table, slots, slots, filtered=False)
    changes = draw.Changes(torch.zeros(3, 2, dtype=torch.int32), counts.bool(), counts)
    draw.draw(logits, table, slots, slots, logprobs=True, changes=changes)


def main(capabilities: list[int]) -> None:
    for capability in capabilities:
        half = torch.float16 if capability < 80 else torch.bfloat16
        for dtype, *shape in ((half, 16, 8, 128), (half, 7, 1, 80), (half, 8, 2, 256), (torch.float32, 8, 2, 256)):
            with compiling_for(capability, f"{dtype}, heads {shape}"):
                launch_attention(dtype, *shape)
        if capability == 86:
            continue  # 8.0's instructions with less shared memory, of which only attention asks for much
        with compiling_for(capability, str(half)):
            launch_pointwise(half)
            launch_sampling(half)
            launch_expand()


if __name__ == "__main__":
    main([int(name) for name in sys.argv[1:]])
