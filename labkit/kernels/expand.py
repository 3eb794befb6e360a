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

A step of decodes alone needs less, and has kernels of its own, in C++ and in Triton: one call or launch instead of
fifteen, which on an H200 is a fortieth of the time of a step of one sequence.

Letters: T tokens, C chunks, S decodes, B block size, W columns of the block tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.kernels import backend, native
from labkit.kernels.jit import jit, tl
from labkit.kernels.launch import dependent

# What is said of a decode: its slot and position; and the block, if it is new, that goes to a place of the tables.
SLOT, START, TABLE_SLOT, TABLE_COLUMN, BLOCK = range(5)
COLUMNS = 1024  # of the block tables that a program copies at once


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


@dataclass(slots=True)
class Decodes:
    """What attention and embedding need of a step of decodes."""

    token_ids: Tensor  # [S]
    places: Tensor  # [S] int64
    context_lens: Tensor  # [S] int32: tokens each one sees, itself included
    block_tables: Tensor  # [S, W]


def expand_decodes(rows: Tensor, block_tables: Tensor, last_tokens: Tensor, block_size: int, width: int) -> Decodes:
    """Enters new blocks in the block tables, and looks up what each decode needs.

    Args:
        rows: [5, S] int32: SLOT … BLOCK of each
        block_tables: [slots, at least W] int32
        last_tokens: [slots] int32
        width: W, columns of the block tables that the longest context fills
    """
    if backend.on_cpp():
        return Decodes(*native.expand_decodes(rows, block_tables, last_tokens, block_size, width))
    if backend.on_triton():
        return _expand_decodes_triton(rows, block_tables, last_tokens, block_size, width)
    slots, starts, table_slots, columns, blocks = rows.unbind(0)
    block_tables.index_put_((table_slots, columns), blocks)
    tables = block_tables[:, :width].index_select(0, slots)
    own = tables.gather(1, (starts // block_size).long().unsqueeze(1)).squeeze(1).long()
    return Decodes(last_tokens.index_select(0, slots), own * block_size + starts % block_size, starts + 1, tables)


def _expand_decodes_triton(
    rows: Tensor, block_tables: Tensor, last_tokens: Tensor, block_size: int, width: int
) -> Decodes:
    """The same in one launch. Behind a context's last block its row of the result is left as it was."""
    count = rows.shape[1]
    token_ids = torch.empty(count, dtype=torch.int32, device=rows.device)
    context_lens = torch.empty_like(token_ids)
    where = torch.empty(count, dtype=torch.int64, device=rows.device)
    tables = torch.empty(count, width, dtype=torch.int32, device=rows.device)
    decodes_kernel[(count,)](
        rows, block_tables, last_tokens, token_ids, where, context_lens, tables,
        rows.stride(0), block_tables.stride(0), width,
        B=block_size, COLUMNS=COLUMNS, num_warps=4, **dependent(rows.device),
    )  # fmt: skip
    return Decodes(token_ids, where, context_lens, tables)


@jit(do_not_specialize=["row_stride", "table_stride", "width"])
def decodes_kernel(
    rows, block_tables, last_tokens, token_ids, places, context_lens, tables, row_stride, table_stride, width,
    B: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (S,). A program reads its own slot's row and writes a new block into no other, so their order is free."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0)
    slot = tl.load(rows + index).to(tl.int64)
    start = tl.load(rows + row_stride + index)
    table_slot = tl.load(rows + 2 * row_stride + index).to(tl.int64)
    new_column = tl.load(rows + 3 * row_stride + index)
    new_block = tl.load(rows + 4 * row_stride + index)
    tl.store(token_ids + index, tl.load(last_tokens + slot))
    tl.store(context_lens + index, start + 1)
    for first in range(0, start // B + 1, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        there = column <= start // B
        block = tl.load(block_tables + slot * table_stride + column, mask=there, other=0)
        block = tl.where((slot == table_slot) & (column == new_column), new_block, block)
        tl.store(tables + index.to(tl.int64) * width + column, block, mask=there & (column < width))
        own = tl.sum(tl.where(column == start // B, block, 0), 0)
        if first + COLUMNS > start // B:
            tl.store(places + index, own.to(tl.int64) * B + start % B)
    tl.store(block_tables + table_slot * table_stride + new_column, new_block)
