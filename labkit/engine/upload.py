"""What the host says of a step, as int32: one pinned buffer and one copy, or the input of a CUDA graph.

Any step:

    ┌──────────────────┬─────────────┬──────────────────┬────────┬─────────┬──────────────────────────────┐
    │ chunks           │ draws       │ new blocks       │ tokens │ targets │ sampler's                    │
    │ slot[C] start[C] │ row[S]      │ slot[N] index[N] │ one a  │ of      │ parameters, history          │
    │ length[C]        │ chunk[S]    │ block[N]         │ row    │ prompt  │ (fresh slots), adjustments,  │
    │                  │             │                  │        │ logprobs│ rows with penalties/logprobs │
    └──────────────────┴─────────────┴──────────────────┴────────┴─────────┴──────────────────────────────┘

Decodes alone, by requests that want nothing but a token, have five numbers each (`expand.expand_decodes`). With
prompts beside them a graph gets chunks and tokens, padded, and the number of decodes.
"""

from __future__ import annotations

from collections.abc import Sequence as Numbers
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from labkit.engine.request import Chunk, Sequence
from labkit.engine.sampler import DrawPlan
from labkit.kernels.expand import TABLE_SLOT


@dataclass(slots=True)
class Upload:
    """The sections of any step's buffer, on the device."""

    chunks: Tensor  # [3, C]: slot, start, length
    draws: Tensor  # [2, S]: row among the step's tokens, number of its chunk
    blocks: Tensor  # [3, N]: slot, index in the block table, block
    tokens: Tensor  # [T]: of prompts, at their rows; 0 for decodes
    targets: Tensor  # [L]: the tokens that prompt_logprobs are asked for
    parameters: Tensor  # the rest as in DrawPlan
    history: Tensor
    adjustments: Tensor
    penalised: Tensor
    with_logprobs: Tensor


def upload_parts(chunks: list[Chunk], admitted: list[Sequence], plan: DrawPlan) -> list[np.ndarray]:
    """The sections of `Upload`, in its order."""
    number = {id(chunk): index for index, chunk in enumerate(chunks)}
    drawing = np.array([number[id(chunk)] for chunk in plan.chunks], np.int32)
    ends = np.cumsum(np.array([chunk.length for chunk in chunks], np.int32))
    tokens: list[int] = []
    targets: list[int] = []
    for chunk in chunks:
        if chunk.is_decode:
            tokens.append(0)
        else:
            tokens += chunk.seq.token_ids(chunk.start, chunk.start + chunk.length)
            targets += chunk.seq.prompt_token_ids[chunk.start + 1 :][: num_targets(chunk)]
    return [
        _chunk_rows(chunks),
        np.array([ends[drawing] - 1, drawing], np.int32),
        new_blocks(chunks, admitted),
        np.array(tokens, np.int32),
        np.array(targets, np.int32),
        plan.parameters,
        plan.history,
        plan.adjustments,
        plan.penalised,
        plan.with_logprobs,
    ]


def decode_rows(chunks: list[Chunk], nobody: Numbers[int]) -> np.ndarray:
    """[5, n] of `expand_decodes`; `nobody` [5] is the one that pads, whose block anybody may enter again."""
    nothing = nobody[TABLE_SLOT:]
    rows = [
        (chunk.seq.slot, chunk.start, *nothing)
        if not chunk.new_blocks
        else (chunk.seq.slot, chunk.start, chunk.seq.slot, len(chunk.seq.block_table) - 1, chunk.new_blocks[0])
        for chunk in chunks
    ]
    return np.array(rows, np.int32).T


def mixed_numbers(chunks: list[Chunk], size: int, most: int, padding_slot: int) -> np.ndarray:
    """For a graph of `size` tokens: [3 (most + 1) + size + 1] of chunks, tokens, and the number of decodes.

    `most` is the most chunks that there can be, so the last one is always padding, and owns the rows that are.
    """
    columns = most + 1
    numbers = np.zeros(3 * columns + size + 1, np.int32)
    table, tokens = numbers[: 3 * columns].reshape(3, columns), numbers[3 * columns : -1]
    table[0] = padding_slot
    row = 0
    for chunk in chunks:
        if not chunk.is_decode:
            tokens[row : row + chunk.length] = chunk.seq.token_ids(chunk.start, chunk.start + chunk.length)
        row += chunk.length
    if chunks:
        table[:, : len(chunks)] = _chunk_rows(chunks)
        numbers[-1] = sum(chunk.is_decode for chunk in chunks)
    return numbers


def _chunk_rows(chunks: list[Chunk]) -> np.ndarray:
    """[3, C]: slot, start, length."""
    return np.array([(chunk.seq.slot, chunk.start, chunk.length) for chunk in chunks], np.int32).T


def num_targets(chunk: Chunk) -> int:
    """How many of the chunk's rows predict a prompt token whose log-probability is asked for."""
    if chunk.seq.params.prompt_logprobs is None:
        return 0
    return max(0, min(chunk.length, chunk.seq.num_prompt_tokens - 1 - chunk.start))


def new_blocks(chunks: list[Chunk], admitted: list[Sequence]) -> np.ndarray:
    """What changes in the block tables: [3, N] of slot, index, block. A fresh slot gets its whole table."""
    entries = [(seq.slot, index, block) for seq in admitted for index, block in enumerate(seq.block_table)]
    fresh = {id(seq) for seq in admitted}
    for chunk in chunks:
        if chunk.new_blocks and id(chunk.seq) not in fresh:
            first = len(chunk.seq.block_table) - len(chunk.new_blocks)
            entries += [(chunk.seq.slot, first + i, block) for i, block in enumerate(chunk.new_blocks)]
    return np.array(entries, np.int32).reshape(-1, 3).T
