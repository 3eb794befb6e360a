"""The attention kernels on a GPU, against their PyTorch definitions in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labkit.kernels import decode_attention, prefill_attention, qkv_rope
from labkit.kernels.attention_batch import AttentionBatch, PromptChunk
from labkit.kernels.tiles import DecodeTile, power_of_two, prefill_tile

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
DTYPES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HEAD_DIMS = [24, 64, 80, 96, 112, 128, 192, 256]
SHAPES = [(9, 3, head_dim) for head_dim in HEAD_DIMS] + [(16, 8, 128), (7, 1, 128), (40, 1, 64)]  # H, K, D
LENGTHS = [1, 15, 16, 17, 31, 33, 257, 0, 1000]


def pool(blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (blocks, 16, kv_heads, head_dim)
    return torch.randn(shape, dtype=dtype, device=DEVICE), torch.randn(shape, dtype=dtype, device=DEVICE)


def scattered(sequences: int, width: int) -> Tensor:
    return torch.randperm(sequences * width, device=DEVICE).view(sequences, width).int()


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def want_decodes(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lens: Tensor, window: int | None) -> Tensor:
    batch = AttentionBatch(torch.empty(0), tables, lens.clamp(min=1), int(lens.max()))
    out = decode_attention.decode_attention(q.float().contiguous(), k.float(), v.float(), batch, window)
    return out.masked_fill((lens == 0)[:, None, None], 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads,kv_heads,head_dim", SHAPES)
def test_decodes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    lens = ints(LENGTHS)
    k, v = pool(len(lens) * 63, kv_heads, head_dim, dtype)
    tables = scattered(len(lens), 63)
    q = torch.randn(len(lens), 2 * heads, head_dim, dtype=dtype, device=DEVICE)[:, :heads]
    cases: list[tuple[int | None, dict[str, int]]] = [(None, {"splits": 1}), (None, {}), (20, {"split_size": 256})]
    for window, options in cases:
        want = want_decodes(q, k, v, tables, lens, window)
        got = decode_attention.decode_attention_triton(q, k, v, tables, lens, 1000, window, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(got.float(), want, atol=DTYPES[dtype], rtol=0)


@pytest.mark.parametrize("heads,kv_heads,head_dim", [(16, 8, 128), (9, 3, 64), (7, 1, 80), (40, 1, 256)])
def test_decodes_without_tensor_cores(heads: int, kv_heads: int, head_dim: int) -> None:
    """What Turing runs."""
    lens = ints(LENGTHS)
    k, v = pool(len(lens) * 63, kv_heads, head_dim, torch.float16)
    tables = scattered(len(lens), 63)
    q = torch.randn(len(lens), heads, head_dim, dtype=torch.float16, device=DEVICE)
    tile = DecodeTile(4, 2048 // power_of_two(head_dim), 4, 1, dot=False)
    for splits in (1, 8):
        got = decode_attention.decode_attention_triton(q, k, v, tables, lens, 1000, tile=tile, splits=splits)
        torch.testing.assert_close(got.float(), want_decodes(q, k, v, tables, lens, None), atol=4e-3, rtol=0)


def check_prompts(
    starts: list[int], lengths: list[int], heads: int, kv_heads: int, k: Tensor, v: Tensor, tables: Tensor,
    window: int | None,
) -> None:  # fmt: skip
    head_dim, dtype, rows = k.shape[3], k.dtype, sum(lengths) + 5
    q = torch.randn(rows, heads, head_dim, dtype=dtype, device=DEVICE)
    tile = prefill_tile(dtype, head_dim, heads // kv_heads, DEVICE)
    assert tile is not None
    ends = ints(starts) + ints(lengths)
    prompts = prefill_attention.make_prompts(tile, heads // kv_heads, rows, tables, ints(lengths), ends)
    out = torch.full_like(q, 9.0)
    prefill_attention.prefill_attention_triton(q, k, v, prompts, window, out=out)
    assert (out[-5:] == 9).all()
    row = 0
    for table, start, length in zip(tables, starts, lengths, strict=True):
        if length:
            # Only the chunk's own blocks become float32: the pool may be large.
            blocks = table[: -(-(start + length) // 16)]
            batch = AttentionBatch(torch.empty(0), tables[:0], torch.empty(0), 0)  # holds masks, so one for each chunk
            chunk = PromptChunk(0, start, length, torch.arange(len(blocks), device=DEVICE))
            part = (q[row : row + length].float(), k[blocks].float(), v[blocks].float())
            want = prefill_attention.chunk_attention(*part, batch, chunk, window)
            torch.testing.assert_close(out[row : row + length].float(), want, atol=DTYPES[dtype], rtol=0)
        row += length


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads,kv_heads,head_dim", SHAPES)
def test_prompts(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    starts, lengths = [0, 0, 13, 16, 30, 600], [1, 17, 400, 33, 0, 300]
    k, v = pool(6 * 60, kv_heads, head_dim, dtype)
    for window in (None, 100):
        check_prompts(starts, lengths, heads, kv_heads, k, v, scattered(6, 60), window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_norm_rope_store(head_dim: int, norm: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, tokens = 9, 3, 300
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=DEVICE)
    positions = torch.randint(1000, (tokens,), dtype=torch.int32, device=DEVICE)
    cos_sin = torch.randn(1000, head_dim, device=DEVICE)
    slots = torch.randperm(40 * 16, device=DEVICE)[:tokens]
    weights = torch.randn(2, head_dim, dtype=dtype, device=DEVICE).unbind(0) if norm else (None, None)
    k, v = pool(40, kv_heads, head_dim, dtype)
    expected = [k.clone(), v.clone()]
    want = [qkv_rope.norm_rope_store(qkv, positions, cos_sin, *expected, slots, *weights), *expected]
    got = [qkv_rope.norm_rope_store_triton(qkv, positions, cos_sin, k, v, slots, *weights), k, v]
    relative = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=relative, rtol=relative)


def test_a_pool_beyond_two_to_the_31() -> None:
    """140,000 blocks of 16,384 numbers: 2.3e9 for keys and as many for values."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free GPU memory")
    kv_heads, head_dim, heads, blocks = 8, 128, 16, 140_000
    k, v = (torch.empty(blocks, 16, kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    last = torch.arange(blocks - 6 * 60, blocks, device=DEVICE)
    tables = last[torch.randperm(6 * 60, device=DEVICE)].view(6, 60).int()
    k[last], v[last] = pool(6 * 60, kv_heads, head_dim, torch.bfloat16)
    check_prompts([0, 0, 13, 16, 30, 600], [1, 17, 400, 33, 0, 300], heads, kv_heads, k, v, tables, None)

    q, lens = torch.randn(6, heads, head_dim, dtype=torch.bfloat16, device=DEVICE), ints([1, 17, 900, 33, 0, 500])
    blocks_in_order = torch.arange(6 * 60, device=DEVICE).view(6, 60)
    there = tables.flatten().long()
    want = want_decodes(q, k[there], v[there], blocks_in_order, lens, None)
    got = decode_attention.decode_attention_triton(q, k, v, tables, lens, 900)
    torch.testing.assert_close(got.float(), want, atol=3e-2, rtol=0)

    qkv = torch.randn(4, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16, device=DEVICE)
    slots = blocks * 16 - 1 - torch.arange(4, device=DEVICE)
    table = torch.zeros(8, head_dim, device=DEVICE)
    table[:, : head_dim // 2] = 1  # cosines: nothing is turned
    qkv_rope.norm_rope_store_triton(qkv, torch.arange(4, device=DEVICE).int(), table, k, v, slots)
    rows = qkv.view(4, -1, head_dim)
    assert torch.equal(k.view(-1, kv_heads, head_dim)[slots], rows[:, heads : heads + kv_heads])
    assert torch.equal(v.view(-1, kv_heads, head_dim)[slots], rows[:, heads + kv_heads :])


def test_splits_of_fixed_size_do_not_depend_on_neighbours() -> None:
    lens = torch.randint(1, 1000, (64,), dtype=torch.int32, device=DEVICE)
    k, v = pool(64 * 63, 8, 128, torch.bfloat16)
    tables, q = scattered(64, 63), torch.randn(64, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    together = decode_attention.decode_attention_triton(q, k, v, tables, lens, 1000, split_size=256)
    for i in range(0, 64, 7):
        one = slice(i, i + 1)
        alone = decode_attention.decode_attention_triton(
            q[one], k, v, tables[one], lens[one], int(lens[i]), split_size=256
        )
        assert torch.equal(alone, together[one])


def test_one_graph_serves_every_context() -> None:
    lens = ints([5, 700, 33, 64])
    k, v = pool(4 * 63, 8, 128, torch.bfloat16)
    tables, q = scattered(4, 63), torch.randn(4, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    decode_attention.decode_attention_triton(q, k, v, tables, lens, 512)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention.decode_attention_triton(q, k, v, tables, lens, 512)
    for now in ([5, 700, 33, 64], [1000, 1, 0, 512]):
        lens.copy_(ints(now))
        graph.replay()
        want = want_decodes(q, k, v, tables, lens, None)
        torch.testing.assert_close(out.float(), want, atol=3e-2, rtol=0)
