"""From what the host says of a step to what each of its tokens is, on the device.

    chunks      slot   [ 3  0 │ 5      2        ]    decodes first, then pieces of prompts
                start  [17 40 │ 0     16        ]
                length [ 1  1 │ 3      2        ]

    owner              0  1   2  2  2  3  3          which chunk each token is of
    positions          17 40  0  1  2  16 17
    token ids          ◆  ◆   a  b  c  d  e          ◆ the slot's last token, which the step before has drawn
    places             where keys and values go: block_tables[slot, position // B] * B + position % B

Nothing here waits for the device, and shapes depend on the number of chunks and tokens alone, so that a CUDA graph can
hold it. Tokens behind the last chunk are padding: they are counted as the last chunk's, at position 0.

Letters: T tokens, C chunks, B block size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Expanded:
    """A step's tokens, one by one, and its chunks."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T] int32
    places: Tensor  # [T] int64: in tokens from the pool's start
    ends: Tensor  # [C]: behind the last row of each chunk


def expand(
    chunks: Tensor, tokens: Tensor, decodes: int | Tensor, block_tables: Tensor, last_tokens: Tensor, block_size: int
) -> Expanded:
    """What a step's tokens are.

    Args:
        chunks: [3, C] int32: slot, start, length
        tokens: [T] int32: those of prompts, at the rows that they have in the step
        decodes: how many chunks are decodes
        block_tables: [slots, W] int32
        last_tokens: [slots] int32
    """
    slots, starts, lengths = chunks.unbind(0)
    ends = lengths.cumsum(0)
    rows = torch.arange(len(tokens), device=tokens.device)
    owner = torch.searchsorted(ends, rows, right=True).clamp_(max=len(slots) - 1)
    own_slots = slots[owner]
    positions = (rows + (starts - ends + lengths)[owner]).masked_fill_(rows >= ends[-1], 0)
    token_ids = torch.where(owner < decodes, last_tokens[own_slots], tokens)
    return Expanded(token_ids, positions.int(), places(block_tables, own_slots, positions, block_size), ends)


def places(block_tables: Tensor, slots: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Where keys and values of tokens [T] go: [T] int64."""
    blocks = block_tables[slots.long(), (positions // block_size).long()]
    return blocks.long() * block_size + positions % block_size
