"""The CUDA C++ operations of csrc/: what few rows need, RMSNorm and the attention of prompts, built on first use.

Products for few rows, and the attention of few decodes (few_decodes.py) with what stands before it, are the fastest
there are, and "auto" takes them. `kernels="cuda"` means them and the other two, and Triton's kernels for everything
that has no version in CUDA C++: the attention of more decodes, SiLU × mul, sampling. Inputs that norms and the
attention of prompts do not take are refused with a KernelError; nothing else is run instead.

Nothing here waits for the GPU, and all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.errors import KernelError
from labkit.kernels import build

if TYPE_CHECKING:
    from labkit.kernels.prefill_attention import Prompts

SOURCES = ("rms_norm.cu", "flash_attention.cu", "few_rows.cu", "few_decodes.cu")
FLAGS = ("-O3", "-std=c++17")
CAPABILITY = (8, 0)  # the oldest that it runs on: Ampere, with bfloat16 and copies to shared memory on their own
HOPPER = (9, 0)  # whose own tensor core instructions it uses
HEAD_DIMS = (64, 128)
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as csrc/rms_norm.cu numbers them
FEW_ROWS = range(2, 9)  # csrc/few_rows.cu takes 1 to 8; of one Triton's kernels are faster
MOST_WEIGHTS = 1 << 26  # of a product for few rows; with more cuBLAS is faster
FLASH_ROWS = 128  # tokens × query heads of a group in a tile; csrc/flash_attention.cu's ROWS
MAX_WIDTH, MAX_UNALIGNED_WIDTH = 16384, 8192
POINTER, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
FUNCTIONS = {
    "labkit_rms_norm": (*[POINTER] * 4, *[SIZE] * 6, FLOAT, SIZE, POINTER),
    "labkit_few_rows": (*[POINTER] * 6, *[SIZE] * 5, FLOAT, *[SIZE] * 3, POINTER),
    "labkit_few_decodes": (*[POINTER] * 11, ctypes.POINTER(SIZE), *[SIZE] * 6, FLOAT, SIZE, SIZE, POINTER),
    "labkit_flash_attention": (*[POINTER] * 8, ctypes.POINTER(SIZE), *[SIZE] * 7, POINTER),
}


def architecture(capability: tuple[int, int]) -> str:
    """nvcc's name for a chip. Hopper's own tensor core instructions are only in its variant "a"."""
    return f"{capability[0]}{capability[1]}" + ("a" if capability == HOPPER else "")


@functools.cache
def load(capability: tuple[int, int]) -> ctypes.CDLL | str:
    """The library for this compute capability, or the reason why there is none."""
    if build.nvcc() is None:
        return "no CUDA compiler found (nvcc, of the CUDA toolkit; CUDA_HOME says where it is)"
    name = architecture(capability)
    flags = [*FLAGS, f"-gencode=arch=compute_{name},code=sm_{name}"]
    recipe = build.Recipe(
        name="labkit_cuda",
        sources=SOURCES,
        made_for=name,
        announcement="compiling its CUDA operations for this GPU",
        options={"extra_cuda_cflags": flags, "with_cuda": True},
    )
    return build.library(recipe, FUNCTIONS, ctypes.c_int)


def unavailable(
    capability: tuple[int, int], name: str, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> str | None:
    """Why these operations cannot run on a GPU of this capability and name with such weights; None if they can."""
    if capability < CAPABILITY:
        return f"it needs compute capability 8.0, and {name} has {capability[0]}.{capability[1]}"
    if dtype == torch.float32:
        return "its attention takes float16 and bfloat16, and the weights are float32"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"its attention takes heads of 64 or 128 numbers, and these have {head_dim}"
    library = load(capability)
    return library if isinstance(library, str) else None


def call(name: str, device: torch.device, *arguments: object) -> None:
    """Launches on the device's current stream. Raises KernelError if that fails."""
    library = load(torch.cuda.get_device_capability(device))
    if isinstance(library, str):
        raise KernelError(f"the CUDA operations do not run on {device}: {library}")
    with torch.cuda.device(device):
        code = getattr(library, name)(*arguments, torch.cuda.current_stream(device).cuda_stream)
    if code != 0:
        raise KernelError(f"{name} failed on {device} with CUDA error {code}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., E] with numbers of a row side by side, [E] -> [..., E]"""
    rows = x if x.dim() in (2, 3) else x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -3)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(rows, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[T, E], [T, E] overwritten by the sum, [E] -> ([T, E], residual)"""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, residual, weight, out, eps)
    return out, residual


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """x is [T, E] or [T, H, E]; out has its shape, contiguous."""
    if out.numel() == 0:
        return
    others = [weight] if residual is None else [weight, residual]
    if x.dtype not in DTYPES or any(other.dtype != x.dtype or other.device != x.device for other in others):
        types = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in (x, *others))
        raise KernelError(f"RMSNorm in CUDA C++ takes tensors of one floating-point type on one GPU, not {types}")
    if any(tensor.stride(-1) != 1 for tensor in (x, *others)):
        raise KernelError("RMSNorm in CUDA C++ takes rows whose numbers lie side by side; call .contiguous() first")
    heads, head_step = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    steps = (x.stride(0), head_step, 0 if residual is None else residual.stride(0))
    width = x.shape[-1]
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (x, *others))
    aligned = aligned and all(number * x.element_size() % 16 == 0 for number in (width, *steps))
    if width > (MAX_WIDTH if aligned else MAX_UNALIGNED_WIDTH):
        raise KernelError(
            f"RMSNorm in CUDA C++ takes rows of {MAX_WIDTH} numbers at most ({MAX_UNALIGNED_WIDTH} if they are not "
            f"aligned to 16 bytes), and these have {width}; use kernels='triton'"
        )
    pointers = (x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), out.data_ptr())
    sizes = (out.numel() // width, heads, *steps, width)
    call("labkit_rms_norm", x.device, *pointers, *sizes, eps, DTYPES[x.dtype])


def takes_few_rows(x: Tensor, weight: Tensor, norm: Tensor | None = None) -> bool:
    """Whether `few_rows` should compute this: FEW_ROWS rows of 16-bit numbers, all at multiples of 16 bytes.

    With a norm only bfloat16: x × weight, before it is scaled, may be too large for float16.
    """
    width = x.shape[1]
    if norm is not None and width > MAX_WIDTH:
        return False  # it waits in shared memory
    aligned = width % 8 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == 1 and weight.is_contiguous()
    return (
        x.device.type == "cuda"
        and x.shape[0] in FEW_ROWS
        and weight.numel() <= MOST_WEIGHTS
        and x.dtype == weight.dtype
        and x.dtype in ((torch.float16, torch.bfloat16) if norm is None else (torch.bfloat16,))
        and aligned
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight, *([] if norm is None else [norm])))
    )


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + silu_mul(rms_norm(x) Wᵀ + b), of which all but the product may be missing.

    Args:
        x: [T, I] that `takes_few_rows`
        weight: [O, I]; gated: the gate's O/2 rows, then up's
        bias: [O]; a gated product has none
        norm: [I], the norm's weight; None: x as it is
        gated: SiLU × mul comes after the product
        residual: [T, O], not changed; None: nothing is added

    Returns:
        [T, O], gated [T, O/2]
    """
    rows, width = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tensors = (x, norm, weight, bias, residual, out)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    steps = (x.stride(0), 0 if residual is None else residual.stride(0))
    early = torch.cuda.get_device_capability(x.device) >= HOPPER
    kinds = (gated, x.dtype == torch.bfloat16, early)
    call("labkit_few_rows", x.device, *pointers, *steps, rows, width, outputs, eps, *kinds)
    return out


def flash_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prompts: Prompts,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What `prefill_attention.prefill_attention_triton` computes, for 16-bit numbers and heads of 64 or 128.

    Args:
        q: [T, H, D], the rows that prompts.first_rows counts; a head's numbers side by side, else strided
        k_cache, v_cache: [N, B, K, D], one layer's pool; B a multiple of 8
        prompts: with tiles of FLASH_ROWS rows
        window: a token sees itself and the window - 1 tokens before it; None: all of them
        out: [T, H, D] to write into

    Returns:
        [T, H, D]; rows of no chunk are not written
    """
    heads, head_dim = q.shape[1:]
    _, block_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    tables, tiles = prompts.block_tables, prompts.tiles
    if tiles.shape[1] == 0:
        return out
    reason = _unfit(q, k_cache, v_cache, out, prompts)
    if reason is not None:
        raise KernelError(f"attention in CUDA C++ {reason}; use kernels='triton'")
    steps = (*q.stride()[:2], tables.stride(0), *out.stride()[:2], *k_cache.stride()[:3])
    pointers = [x.data_ptr() for x in (q, k_cache, v_cache, out, tables, prompts.first_rows, prompts.context_lens)]
    sizes = (tiles.shape[1], kv_heads, group, head_dim, block_size, window or 0, q.dtype == torch.bfloat16)
    call("labkit_flash_attention", q.device, *pointers, tiles.data_ptr(), (SIZE * len(steps))(*steps), *sizes)
    return out


def _unfit(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, prompts: Prompts) -> str | None:
    """What about these the kernel cannot take; None if it can."""
    heads, head_dim = q.shape[1:]
    block_size = k_cache.shape[1]
    if q.dtype not in (torch.float16, torch.bfloat16) or any(x.dtype != q.dtype for x in (k_cache, v_cache, out)):
        return "takes float16 or bfloat16, the same for all"
    if head_dim not in HEAD_DIMS:
        return f"takes heads of 64 or 128 numbers, and these have {head_dim}"
    if prompts.tile.rows != FLASH_ROWS or heads // k_cache.shape[2] > FLASH_ROWS:
        return f"takes tiles of {FLASH_ROWS} rows, and these have {prompts.tile.rows}"
    # Positions are divided by the block size with a multiplication, which is exact below 2³² / B.
    if block_size % 8 or prompts.block_tables.shape[1] * block_size * block_size >= 1 << 32:
        return f"takes blocks of a multiple of 8 tokens and contexts below 2**32 / B, and blocks have {block_size}"
    if any(x.stride(-1) != 1 for x in (q, k_cache, v_cache, out, prompts.block_tables, prompts.tiles)):
        return "takes heads whose numbers lie side by side"
    if k_cache.stride() != v_cache.stride():
        return "takes keys and values that lie in the same order"
    if k_cache.data_ptr() % 16 or v_cache.data_ptr() % 16 or any(step % 8 for step in k_cache.stride()[:3]):
        return "takes keys and values that begin at multiples of 16 bytes"
    if k_cache.shape[0] * k_cache.stride(0) >= 1 << 35:
        return "takes keys of 64 GB at most in a layer"
    if any(x.data_ptr() % 4 or any(step % 2 for step in x.stride()[:2]) for x in (q, out)):
        return "takes queries that begin at multiples of 4 bytes"
    return None
