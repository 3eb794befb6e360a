"""What a step's tokens are: by a loop over chunks, and by the device's functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labkit.kernels import backend, expand, native
from labkit.kernels.jit import interpreted, triton

BLOCK_SIZE = 4


def tables(slots: int, width: int) -> Tensor:
    """Every slot has blocks of its own."""
    return torch.randperm(slots * width, dtype=torch.int32, generator=torch.Generator().manual_seed(0)).view(slots, -1)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_step_with_prompts(padding: int) -> None:
    block_tables, last_tokens = tables(6, 5), torch.arange(90, 96, dtype=torch.int32)
    chunks = [(3, 17, 1), (0, 4, 1), (5, 0, 3), (2, 14, 2)]  # slot, start, length
    decodes = 2
    want = []
    for index, (slot, start, length) in enumerate(chunks):
        for position in range(start, start + length):
            token = 90 + slot if index < decodes else 10 * slot + position
            block = int(block_tables[slot, position // BLOCK_SIZE])
            want.append((token, position, block * BLOCK_SIZE + position % BLOCK_SIZE))
    tokens = [token if row >= decodes else 0 for row, (token, _, _) in enumerate(want)] + [0] * padding
    if padding:
        chunks.append((1, 0, 0))
        want += [(0, 0, int(block_tables[1, 0]) * BLOCK_SIZE)] * padding
    for count in (decodes, torch.tensor([decodes])):
        got = expand.expand(
            torch.tensor(chunks, dtype=torch.int32).t().contiguous(),
            torch.tensor(tokens, dtype=torch.int32),
            count,
            block_tables,
            last_tokens,
            BLOCK_SIZE,
        )
        assert list(zip(got.token_ids.tolist(), got.positions.tolist(), got.places.tolist(), strict=True)) == want
        assert got.ends[:4].tolist() == [1, 2, 5, 7]


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("width", [5, 1300])
@pytest.mark.parametrize("name", ["torch", "cpp", "triton"])
def test_a_step_of_decodes(name: str, width: int) -> None:
    """Two old blocks, two new ones, and padding twice."""
    if name == "triton" and (triton is None or not interpreted()):
        pytest.skip("needs Triton's interpreter")
    if name == "cpp" and native.missing() is not None:
        pytest.skip(f"no C++ operations: {native.missing()}")
    block_tables, last_tokens = tables(6, width), torch.arange(90, 96, dtype=torch.int32)
    before = block_tables.clone()
    last = 4 * width - 1
    rows = [(3, 6, 5, 0, 777), (0, 16, 0, 4, 801), (2, last, 2, width - 1, 802), (1, 0, 5, 0, 777)]
    rows += [(5, 0, 5, 0, 777)] * 2
    backend.use(name)
    got = expand.expand_decodes(
        torch.tensor(rows, dtype=torch.int32).t().contiguous(), block_tables, last_tokens, BLOCK_SIZE, width
    )
    before[0, 4], before[2, -1], before[5, 0] = 801, 802, 777
    assert torch.equal(block_tables, before)
    assert got.token_ids.tolist() == [93, 90, 92, 91, 95, 95]
    assert got.token_ids.dtype == got.context_lens.dtype == torch.int32 and got.places.dtype == torch.int64
    assert got.context_lens.tolist() == [7, 17, last + 1, 1, 1, 1]
    for index, (slot, start, *_) in enumerate(rows):
        used = start // BLOCK_SIZE + 1
        assert torch.equal(got.block_tables[index, :used], before[slot, :used])
        assert got.places[index] == before[slot, used - 1] * BLOCK_SIZE + start % BLOCK_SIZE
