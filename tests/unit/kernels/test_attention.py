"""Paged attention against a loop over heads and positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from labkit.kernels import attention, prefill_attention
from labkit.kernels.attention_batch import AttentionBatch, PromptChunk


def by_hand(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
    """Tokens start … of one sequence: q [T, H, D] against k, v [N, K, D], in float64, one row of scores at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for row in range(q.shape[0]):
        position = start + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys = k[first : position + 1, head // group].double()
            values = v[first : position + 1, head // group].double()
            weights = (keys @ q[row, head].double() / math.sqrt(q.shape[2])).softmax(-1)
            out[row, head] = weights @ values
    return out


class Pool:
    """Sequences of known keys and values in scattered blocks."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, block_size: int):
        generator = torch.Generator().manual_seed(5)
        need = [-(-n // block_size) for n in lengths]
        total = sum(need) + 2
        # What no one wrote holds large numbers, so that a look beyond the end shows.
        self.k = torch.full((total, block_size, kv_heads, head_dim), 50.0)
        self.v = self.k.clone()
        order = torch.randperm(total, generator=generator).int()
        self.tables = list(order[: sum(need)].split(need))
        self.keys = [torch.randn(n, kv_heads, head_dim, generator=generator) for n in lengths]
        self.values = [torch.randn(n, kv_heads, head_dim, generator=generator) for n in lengths]
        self.block_size = block_size
        for table, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            slots = self.slots(table, 0, len(keys) - 1)
            attention.store_kv(keys[:-1], values[:-1], self.k, self.v, slots)

    def slots(self, table: Tensor, start: int, stop: int) -> Tensor:
        position = torch.arange(start, stop)
        return table[position // self.block_size].long() * self.block_size + position % self.block_size


@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(9, 3, 64), (7, 1, 24), (4, 4, 80)])
def test_decodes_and_chunks_in_one_step(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    """Ragged decodes, one of them with a single token; then a fresh prompt, a chunk with a past, and one more token."""
    lengths = [1, 8, 9, 33, 20, 40, 17]
    starts = [0, 7, 8, 32, 0, 13, 16]
    pool = Pool(lengths, kv_heads, head_dim, block_size=8)
    sizes = [n - s for n, s in zip(lengths, starts, strict=True)]
    merged = torch.randn(sum(sizes), heads + 2 * kv_heads, head_dim)  # as after a merged projection: not contiguous
    q = merged[:, :heads]
    rows = list(torch.arange(sum(sizes)).split(sizes))
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if start == 0:
            continue
        slots = pool.slots(pool.tables[i], 0, start)
        attention.store_kv(pool.keys[i][:start], pool.values[i][:start], pool.k, pool.v, slots)
        assert size == lengths[i] - start
    for i, row in enumerate(rows):
        merged[row, heads : heads + kv_heads] = pool.keys[i][starts[i] :]
        merged[row, heads + kv_heads :] = pool.values[i][starts[i] :]
    k, v = merged[:, heads : heads + kv_heads], merged[:, heads + kv_heads :]
    decodes = 4
    tables = torch.zeros(decodes, 5, dtype=torch.int32)
    for i in range(decodes):
        tables[i, : len(pool.tables[i])] = pool.tables[i]
    batch = AttentionBatch(
        torch.cat([pool.slots(t, s, n) for t, s, n in zip(pool.tables, starts, lengths, strict=True)]),
        tables,
        torch.tensor(lengths[:decodes], dtype=torch.int32),
        max(lengths[:decodes]),
        [PromptChunk(int(rows[i][0]), starts[i], sizes[i], pool.tables[i]) for i in range(decodes, len(lengths))],
    )
    got = attention.attention(q, k, v, pool.k, pool.v, batch, window)
    for i, row in enumerate(rows):
        want = by_hand(q[row], pool.keys[i], pool.values[i], starts[i], window)
        torch.testing.assert_close(got[row].double(), want, atol=2e-5, rtol=0, msg=f"sequence {i}")


@pytest.mark.parametrize("length,context", [(1, 1), (127, 127), (128, 128), (129, 129), (300, 300), (150, 410)])
def test_long_prompts_in_pieces(length: int, context: int) -> None:
    """Around the size that is computed at once."""
    q, k, v = torch.randn(length, 4, 16), torch.randn(context, 2, 16), torch.randn(context, 2, 16)
    mask = prefill_attention.causal_mask(length, context, None, torch.float32, q.device)
    got = prefill_attention.causal_attention(q, k, v, mask)
    torch.testing.assert_close(got.double(), by_hand(q, k, v, context - length, None), atol=2e-5, rtol=0)
    if length == context:
        torch.testing.assert_close(prefill_attention.causal_attention(q, k, v), got, atol=2e-5, rtol=0)


def test_mask_with_a_window() -> None:
    mask = prefill_attention.causal_mask(3, 5, 2, torch.float32, torch.device("cpu"))
    assert (mask == 0).int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(200, n, 32).to(dtype) for n in (4, 2, 2))
    mask = prefill_attention.causal_mask(200, 200, None, dtype, q.device)
    got = prefill_attention.causal_attention(q, k, v, mask)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), by_hand(q, k, v, 0, None), atol=3e-2, rtol=0)


def test_nothing_but_the_given_slots_is_written() -> None:
    k_cache, v_cache = torch.zeros(4, 8, 2, 3), torch.zeros(4, 8, 2, 3)
    k, v = torch.randn(2, 2, 3), torch.randn(2, 2, 3)
    attention.store_kv(k, v, k_cache, v_cache, torch.tensor([9, 31]))
    flat = k_cache.view(32, 2, 3)
    assert torch.equal(flat[[9, 31]], k) and int((flat != 0).any(-1).any(-1).sum()) == 2
    assert torch.equal(v_cache.view(32, 2, 3)[[9, 31]], v)
