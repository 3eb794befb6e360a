"""The C++ operations of csrc/ for the CPU: float32, built with this machine's own compiler on first use."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

import torch
from torch import Tensor

from labkit.kernels import build

SOURCES = (
    "linear.cpp",
    "rms_norm.cpp",
    "activation.cpp",
    "rope.cpp",
    "decode_attention.cpp",
    "expand.cpp",
    "sampling.cpp",
)
FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17")
POINTER, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
FUNCTIONS = {
    "labkit_linear": (POINTER, SIZE, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE),
    "labkit_rms_norm": (POINTER, SIZE, POINTER, POINTER, SIZE, SIZE, FLOAT),
    "labkit_add_rms_norm": (POINTER, SIZE, SIZE, POINTER, POINTER, POINTER, SIZE, SIZE, FLOAT),
    "labkit_silu_mul": (POINTER, POINTER, SIZE, POINTER, SIZE, SIZE),
    "labkit_rope": (POINTER, SIZE, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE),
    "labkit_decode_attention": (POINTER, SIZE, *[POINTER] * 5, *[SIZE] * 7, FLOAT),
    "labkit_expand_decodes": (POINTER, SIZE, POINTER, SIZE, POINTER, SIZE, SIZE, *[POINTER] * 4),
    "labkit_argmax": (POINTER, SIZE, POINTER, SIZE, SIZE),
}


@functools.cache
def load() -> ctypes.CDLL | str:
    """The library, or the reason why there is none. Built once for each compiler flags, sources and processor."""
    return build.library(recipe(), FUNCTIONS)


def recipe() -> build.Recipe:
    """How it is built here."""
    return build.Recipe(
        name="labkit_cpu",
        sources=SOURCES,
        made_for=platform.machine() + _cpu_flags(),
        announcement="compiling its C++ operations for this CPU",
        # PyTorch's own OpenMP library: a second one would bring a second set of threads that fight for the cores.
        options={"extra_cflags": list(FLAGS), "extra_ldflags": [_openmp()]},
    )


def missing() -> str | None:
    """Why the C++ operations cannot run here; None if they can."""
    library = load()
    return library if isinstance(library, str) else None


def _openmp() -> str:
    libraries = Path(torch.__file__).parent / "lib"
    own = sorted(libraries.glob("libgomp*.so*")) or sorted((libraries.parents[1] / "torch.libs").glob("libgomp*.so*"))
    return str(own[0]) if own else "-fopenmp"


def _cpu_flags() -> str:
    """What -march=native depends on. A cache may be shared by machines."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()


def _call(name: str, *arguments: object) -> None:
    getattr(load(), name)(*arguments)


# --------------------------------------------------------------------------- operations; shapes as in their own files


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, I], [O, I], [O] -> [T, O]. Rows of x may lie apart."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size = x.shape
    out = torch.empty(rows, weight.shape[0])
    pointer = None if bias is None else bias.data_ptr()
    _call(
        "labkit_linear", x.data_ptr(), x.stride(0), weight.data_ptr(), pointer, out.data_ptr(), rows, size, len(weight)
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, E], [E] -> [T, E]"""
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape)
    _call("labkit_rms_norm", x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), *x.shape, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[T, E] of any strides, [T, E] overwritten, [E] -> ([T, E], residual)"""
    out = torch.empty(residual.shape)
    pointers = (residual.data_ptr(), weight.data_ptr(), out.data_ptr())
    _call("labkit_add_rms_norm", x.data_ptr(), *x.stride(), *pointers, *x.shape, eps)
    return out, residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2F], row-major or transposed -> [T, F] of the same layout"""
    transposed = gate_up.stride(0) == 1 and gate_up.shape[0] > 1
    gate, up = (half.t() if transposed else half for half in gate_up.chunk(2, dim=-1))
    out = torch.empty(gate.shape)
    _call("labkit_silu_mul", gate.data_ptr(), up.data_ptr(), gate.stride(0), out.data_ptr(), *gate.shape)
    return out.t() if transposed else out


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """[T, N, D], [T] int, [length, D] -> [T, N, D]. Tokens of x may lie apart."""
    if x.stride()[1:] != (x.shape[2], 1):
        x = x.contiguous()
    positions = positions.int()
    out = torch.empty(x.shape)
    pointers = (positions.data_ptr(), cos_sin.data_ptr(), out.data_ptr())
    _call("labkit_rope", x.data_ptr(), x.stride(0), *pointers, *x.shape)
    return out


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, window: int | None
) -> Tensor:
    """[S, H, D], pools [N, B, K, D], [S, blocks] int32, [S] int32 -> [S, H, D]"""
    if q.stride()[1:] != (q.shape[2], 1):
        q = q.contiguous()
    sequences, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    block_tables, context_lens = block_tables.contiguous(), context_lens.contiguous()
    out = torch.empty(q.shape)
    pointers = [t.data_ptr() for t in (k_cache, v_cache, block_tables, context_lens, out)]
    sizes = (sequences, heads, kv_heads, head_dim, block_size, block_tables.shape[1], window or 0)
    _call("labkit_decode_attention", q.data_ptr(), q.stride(0), *pointers, *sizes, head_dim**-0.5)
    return out


def expand_decodes(
    rows: Tensor, block_tables: Tensor, last_tokens: Tensor, block_size: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[5, S], [slots, W] (new blocks are entered), [slots], all int32 -> [S] int32, [S], [S] int32, [S, width]"""
    rows = rows.contiguous()
    count = rows.shape[1]
    token_ids, context_lens = torch.empty(2, count, dtype=torch.int32)
    places, tables = torch.empty(count, dtype=torch.int64), torch.empty(count, width, dtype=torch.int32)
    given = (rows.data_ptr(), count, block_tables.data_ptr(), block_tables.stride(0), last_tokens.data_ptr())
    out = [t.data_ptr() for t in (token_ids, places, context_lens, tables)]
    _call("labkit_expand_decodes", *given, block_size, width, *out)
    return token_ids, places, context_lens, tables


def argmax(x: Tensor) -> Tensor:
    """[T, V], rows may lie apart -> [T] int64: the largest of each row, the lowest index on a tie."""
    out = torch.empty(x.shape[0], dtype=torch.int64)
    _call("labkit_argmax", x.data_ptr(), x.stride(0), out.data_ptr(), *x.shape)
    return out
