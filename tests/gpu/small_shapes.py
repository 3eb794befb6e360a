"""Every GPU kernel once, on small shapes: for compute-sanitizer, which makes everything a hundred times slower.

compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.gpu.small_shapes     (make sanitize)
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.kernels import backend, cuda, few_decodes, prefill_attention
from labkit.kernels.attention_batch import AttentionBatch
from labkit.kernels.tiles import CUDA_TILE
from tests.unit.kernels import cross_compile

DEVICE = torch.device("cuda", 0)


def cuda_operations(dtype: torch.dtype, head_dim: int) -> None:
    x, weight = torch.randn(5, 1003, dtype=dtype), torch.randn(1003, dtype=dtype)
    cuda.rms_norm(x, weight, 1e-6)
    cuda.add_rms_norm(x[:, :1000], x[:, 1:1001].contiguous(), weight[:1000], 1e-6)
    for outputs, width, rows in ((5, 40, 8), (33, 1000, 3), (16, 4200, 1)):
        x, weight = torch.randn(rows, width, dtype=dtype), torch.randn(2 * outputs, width, dtype=dtype)
        norm = torch.randn(width, dtype=dtype) if dtype == torch.bfloat16 else None
        cuda.few_rows(x, weight, weight[:, 0].contiguous(), norm, 1e-6)
        cuda.few_rows(x, weight, norm=norm, eps=1e-6, gated=True)
        cuda.few_rows(x, weight[:outputs], residual=torch.randn(rows, outputs + 3, dtype=dtype)[:, :outputs])
    pool = torch.randn(2, 9, 16, 2, head_dim, dtype=dtype)
    lengths, starts = torch.tensor([70, 0, 17], dtype=torch.int32), torch.tensor([0, 0, 30], dtype=torch.int32)
    tables = torch.arange(9, dtype=torch.int32).view(3, 3).repeat(1, 2)
    prompts = prefill_attention.make_prompts(CUDA_TILE, 3, 90, tables, lengths, starts + lengths)
    q = torch.randn(90, 6, head_dim, dtype=dtype)
    for window in (None, 20):
        cuda.flash_attention(q, *pool.unbind(0), prompts, window)
    few_decodes_of(pool, dtype, head_dim)


def few_decodes_of(pool: Tensor, dtype: torch.dtype, head_dim: int) -> None:
    lens = torch.tensor([100, 0, 17], dtype=torch.int32)
    tables = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0] * 7, [7, 8, 0, 0, 0, 0, 0]], dtype=torch.int32)
    batch = AttentionBatch(torch.tensor([99, 0, 8 * 16]), tables, lens, 100)
    qkv, cos_sin = torch.randn(3, 10 * head_dim, dtype=dtype), torch.randn(100, head_dim)
    for window, cluster, norm in ((None, 8, None), (20, 1, pool[0, 0, 0, 0])):
        few_decodes.few_decodes(
            qkv, (lens - 1).clamp(min=0), cos_sin, *pool.unbind(0), batch, norm, norm, 1e-6, window, cluster
        )


def main() -> None:
    with torch.device(DEVICE):
        for dtype in (torch.float16, torch.bfloat16):
            for shape in ((16, 8, 128), (7, 1, 80), (8, 2, 64)):
                cross_compile.launch_attention(dtype, *shape)
            cross_compile.launch_pointwise(dtype)
            cross_compile.launch_sampling(dtype, "cuda")
            if backend.unavailable("cuda", DEVICE) is None:
                for head_dim in (64, 128):
                    cuda_operations(dtype, head_dim)
        cross_compile.launch_expand()
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
