"""The attention kernels against their PyTorch definitions, in Triton's interpreter; and compiled for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from labkit.kernels import attention, backend, decode_attention, prefill_attention, qkv_rope
from labkit.kernels.attention_batch import AttentionBatch, PromptChunk
from labkit.kernels.tiles import DecodeTile, PrefillTile, decode_tile_for, prefill_tile_for

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(
    backend.unavailable("triton", CPU) is not None, reason="needs Triton and its interpreter (TRITON_INTERPRET=1)"
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
DOT, NO_DOT = DecodeTile(16, 32, 4, 1), DecodeTile(4, 8, 4, 1, dot=False)


def pool(blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16) -> tuple[Tensor, Tensor]:
    shape = (blocks, block_size, kv_heads, head_dim)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def scattered(sequences: int, width: int) -> Tensor:
    """Block tables [sequences, width] without a block twice."""
    return torch.randperm(sequences * width).view(sequences, width).int()


def want_decodes(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lens: Tensor, window: int | None) -> Tensor:
    """The definition in float32; zeros where there is nothing to see."""
    batch = AttentionBatch(torch.empty(0), tables, lens.clamp(min=1), int(lens.max()))
    out = decode_attention.decode_attention(q.float().contiguous(), k.float(), v.float(), batch, window)
    return out.masked_fill((lens == 0)[:, None, None], 0)


@pytest.mark.parametrize(
    "shape,window,tile,dtype,options",
    [
        ((6, 2, 24), None, DOT, torch.float32, {}),
        ((6, 2, 24), 5, DOT, torch.float16, {"splits": 4}),
        ((6, 2, 24), 100, NO_DOT, torch.float16, {"splits": 1}),
        ((7, 1, 80), None, NO_DOT, torch.float16, {"splits": 2}),
        ((7, 1, 80), 20, DOT, torch.float32, {"split_size": 16}),
        ((7, 1, 80), 1, DOT, torch.float32, {"splits": 1}),
        ((2, 2, 64), None, DOT, torch.float16, {"split_size": 24}),
        ((2, 2, 64), 5, NO_DOT, torch.float32, {}),
        (
            (1, 1, 16),
            None,
            DOT,
            torch.float32,
            {"splits": 64},
        ),  # more than there are tokens, and than are merged at once
    ],
)
def test_decodes(
    shape: tuple[int, int, int], window: int | None, tile: DecodeTile, dtype: torch.dtype, options: dict[str, int]
) -> None:
    """Ragged lengths around the block size, one of them padding; in one piece, in shares, in pieces of fixed size."""
    heads, kv_heads, head_dim = shape
    lens = torch.tensor([1, 15, 16, 17, 33, 0], dtype=torch.int32)
    k, v = pool(24, kv_heads, head_dim, dtype)
    tables = scattered(len(lens), 3)
    q = torch.randn(len(lens), heads * 2, head_dim).to(dtype)[:, :heads]  # not contiguous
    want = want_decodes(q, k, v, tables, lens, window)
    got = decode_attention.decode_attention_triton(q, k, v, tables, lens, 33, window, tile=tile, **options)  # type: ignore[arg-type]
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("bound,split_size", [(1, None), (20, 16), (300, None)])
def test_the_bound_on_the_context_may_be_wrong(bound: int, split_size: int | None) -> None:
    """A graph is captured for a bound; what lies on the device decides."""
    lens = torch.tensor([3, 41], dtype=torch.int32)
    k, v = pool(12, 1, 16, torch.float32, block_size=8)
    tables, q = scattered(2, 6), torch.randn(2, 2, 16)
    got = decode_attention.decode_attention_triton(q, k, v, tables, lens, bound, split_size=split_size)
    torch.testing.assert_close(got, want_decodes(q, k, v, tables, lens, None), atol=1e-5, rtol=0)


def test_splits_of_fixed_size_do_not_depend_on_neighbours() -> None:
    lens = torch.tensor([100, 3, 40], dtype=torch.int32)
    k, v = pool(21, 1, 32, torch.float16)
    tables, q = scattered(3, 7), torch.randn(3, 2, 32).half()
    together = decode_attention.decode_attention_triton(q, k, v, tables, lens, 100, split_size=32)
    for i in range(3):
        one = slice(i, i + 1)
        alone = decode_attention.decode_attention_triton(
            q[one], k, v, tables[one], lens[one], int(lens[i]), split_size=32
        )
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("tile", [DOT, NO_DOT])
def test_who_merges_the_splits_leaves_the_counters_at_zero(tile: DecodeTile) -> None:
    """A graph replays the launch: each must find what the first one found. Five heads of a group take two programs."""
    lens = torch.tensor([70, 9, 0, 33], dtype=torch.int32)
    k, v = pool(20, 2, 16, torch.float32)
    tables, q = scattered(4, 5), torch.randn(4, 10, 16)
    want = want_decodes(q, k, v, tables, lens, None)
    for _ in range(2):
        got = decode_attention.decode_attention_triton(q, k, v, tables, lens, 80, tile=tile, splits=4)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
        assert not any(decode_attention._counters(CPU, size).any() for size in (8, 16))


def test_no_sequences() -> None:
    k, v = pool(2, 2, 16, torch.float32)
    nobody = torch.empty(0, dtype=torch.int32)
    got = decode_attention.decode_attention_triton(torch.empty(0, 4, 16), k, v, nobody.view(0, 1), nobody, 0)
    assert got.shape == (0, 4, 16)


@pytest.mark.parametrize(
    "sequences,context,splits",
    [
        (1, 400, 16),
        (1, 641, 16),
        (1, 4096, 64),
        (8, 400, 16),
        (32, 400, 4),
        (64, 400, 1),
        (256, 800, 1),
        (1, 1, 1),
    ],
)
def test_number_of_splits(sequences: int, context: int, splits: int) -> None:
    assert decode_attention.num_splits(sequences, 8, context) == splits


@pytest.mark.parametrize(
    "shape,window,tile,dtype",
    [
        ((6, 2, 24), None, PrefillTile(16, 16, 4, 1), torch.float32),
        ((6, 2, 24), 5, PrefillTile(32, 16, 4, 1), torch.float16),
        ((7, 1, 80), 40, PrefillTile(128, 32, 4, 1), torch.float16),
        ((7, 1, 80), None, PrefillTile(64, 32, 4, 1), torch.float16),
        ((2, 2, 64), 1, PrefillTile(16, 16, 4, 1), torch.float32),
        ((2, 2, 64), 33, PrefillTile(16, 16, 4, 1), torch.float32),
    ],
)
def test_prompts(shape: tuple[int, int, int], window: int | None, tile: PrefillTile, dtype: torch.dtype) -> None:
    """Fresh prompts and later chunks, one of them empty, and rows behind the last that are left alone."""
    heads, kv_heads, head_dim = shape
    starts, lengths = torch.tensor([0, 0, 13, 30, 60]), torch.tensor([1, 17, 20, 0, 33])
    k, v = pool(30, kv_heads, head_dim, dtype)
    tables = scattered(5, 6)
    rows = int(lengths.sum()) + 7
    q = torch.randn(rows, heads * 2, head_dim).to(dtype)[:, :heads]
    prompts = prefill_attention.make_prompts(tile, heads // kv_heads, rows, tables, lengths, starts + lengths)
    got = torch.full((rows, heads, head_dim), 9.0, dtype=dtype)
    prefill_attention.prefill_attention_triton(q, k, v, prompts, window, out=got)
    assert (got[-7:] == 9).all()
    for i, (out, queries) in enumerate(zip(got[:-7].split(lengths.tolist()), q[:-7].split(lengths.tolist()))):
        chunk = PromptChunk(0, int(starts[i]), int(lengths[i]), tables[i, : -(-int(starts[i] + lengths[i]) // 16)])
        batch = AttentionBatch(torch.empty(0), tables[:0], torch.empty(0), 0)
        if chunk.length:
            want = prefill_attention.chunk_attention(queries.float(), k.float(), v.float(), batch, chunk, window)
            torch.testing.assert_close(out.float(), want, atol=TOLERANCE[dtype], rtol=0, msg=f"chunk {i}")


def test_tiles_cover_every_token_once_and_start_with_the_longest() -> None:
    lengths, starts = torch.tensor([5, 0, 9, 4, 1]), torch.tensor([0, 7, 100, 3, 50])
    first_rows = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
    tiles = prefill_attention.make_tiles(first_rows, starts + lengths, tokens=4, rows=25).tolist()
    found = [(chunk, first) for chunk, first in zip(*tiles, strict=True) if chunk >= 0]
    assert sorted(found) == [(0, 0), (0, 4), (2, 0), (2, 4), (2, 8), (3, 0), (4, 0)]
    assert found[:4] == [(2, 8), (2, 4), (2, 0), (4, 0)]
    nothing = prefill_attention.make_tiles(first_rows[:1], starts[:0], tokens=4, rows=0)
    assert nothing.shape == (2, 0)


@pytest.mark.parametrize("how", ["prompts", "padded", "one by one"])
def test_a_mixed_step(how: str) -> None:
    """Two decodes and two chunks of prompts; without tiles, as on Turing, chunks go to PyTorch.

    Padded as for a graph: any chunk may be a decode by its place, but for the last one, which is never anything.
    """
    k, v = pool(20, 2, 24, torch.float32)
    tables = scattered(4, 5)
    starts, lengths = [16, 40, 0, 20], [1, 1, 18, 5]
    chunks = [PromptChunk(2, 0, 18, tables[2, :2]), PromptChunk(20, 20, 5, tables[3, :2])]
    lens = torch.tensor([17, 41], dtype=torch.int32)
    batch = AttentionBatch(torch.empty(0), tables[:2], lens, 41, chunks)
    q = torch.randn(25, 6, 24)
    want = [decode_attention.decode_attention(q[:2], k, v, batch)]
    want += [prefill_attention.chunk_attention(q[c.row : c.row + c.length], k, v, batch, c) for c in chunks]
    tile = PrefillTile(16, 16, 4, 1)
    ends = torch.tensor(starts) + torch.tensor(lengths)
    if how == "prompts":
        batch.prompts = prefill_attention.make_prompts(tile, 3, 25, tables, torch.tensor(lengths), ends, 2)
    elif how == "padded":
        nobody = torch.zeros(2, 5, dtype=torch.int32)
        lens = torch.tensor([17, 41, 0, 0, 0], dtype=torch.int32)
        tables, ends = torch.cat((tables, nobody)), torch.cat((ends, torch.zeros(2, dtype=torch.int64)))
        tensors = torch.tensor([*lengths, 0, 0]), ends, torch.tensor([2])
        prompts = prefill_attention.make_prompts(tile, 3, 32, tables, *tensors)
        batch = AttentionBatch(torch.empty(0), tables[:5], lens, 64, prompts=prompts)
        q = torch.cat((q, torch.randn(7, 6, 24)))
    got = attention.paged_attention(q, k, v, batch)[:25]
    torch.testing.assert_close(got, torch.cat(want), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype,norm", [(torch.float32, True), (torch.float32, False), (torch.float16, True)])
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(6, 2, 24), (7, 1, 80), (2, 2, 64)])
def test_norm_rope_store(heads: int, kv_heads: int, head_dim: int, norm: bool, dtype: torch.dtype) -> None:
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(5, width + 3).to(dtype)[:, :width]  # rows with a gap
    positions = torch.tensor([0, 3, 9, 1, 30], dtype=torch.int32)
    cos_sin = torch.randn(40, head_dim)
    slots = torch.tensor([0, 319, 5, 16, 17])
    weights = torch.randn(2, head_dim).to(dtype).unbind(0) if norm else (None, None)
    k, v = pool(20, kv_heads, head_dim, dtype)
    expected = [k.clone(), v.clone()]
    want = [qkv_rope.norm_rope_store(qkv.contiguous(), positions, cos_sin, *expected, slots, *weights), *expected]
    got = [qkv_rope.norm_rope_store_triton(qkv, positions, cos_sin, k, v, slots, *weights), k, v]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 4e-3)
    transposed = qkv_rope.norm_rope_store_triton(qkv.t().contiguous().t(), positions, cos_sin, k, v, slots, *weights)
    assert torch.equal(transposed, got[0])


@pytest.mark.parametrize("shared", [64, 99, 163, 227])
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128, 192, 256])
def test_tiles_fit_into_shared_memory(head_dim: int, shared: int) -> None:
    width = 1 << (head_dim - 1).bit_length()
    for dtype in (torch.float32, torch.float16):
        size = 2 * width * dtype.itemsize
        for few in (True, False):
            tile = decode_tile_for(dtype, head_dim, 4, few, True, shared << 10)
            assert tile.stages * tile.tokens * size <= shared << 10
        prompt = prefill_tile_for(dtype, head_dim, 4, shared << 10)
        assert prompt.rows % 4 == 0 and prompt.tokens >= 16


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_compile_and_fit_on_every_chip(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.unit.kernels.cross_compile", "75", "80", "86", "90"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert {row["capability"] for row in rows} == {75, 80, 86, 90}
    assert {row["kernel"] for row in rows if row["capability"] == 90} >= {"decode_kernel", "prefill_kernel"}
    assert not [row for row in rows if row["shared"] > row["limit"]]
