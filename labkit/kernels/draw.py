"""A step's whole draw in two Triton kernels: `sampling` is the definition, row by row.

    logits [S, V] ──▶ first kernel, one program a chunk of a row          second kernel, one program a row
                      ├ bias, min_tokens, penalties (if any, into a copy)
                      ├ log-sum-exp of the raw logits (if asked)   ──────▶ log-probability of the token
                      ├ plain row:    best of logits/T + noise     ──────▶ best of the chunks
                      └ filtered row: largest of each small group  ──────▶ what the filters keep, best of it (`filters`)

A greedy row is a plain row without noise. Parameters are read from the slots' rows on the device, so nothing waits for
the host and a CUDA graph can hold it all.

Letters: S rows that draw, V vocabulary, C chunks of a row, N adjustments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.kernels.draw_chunks import chunk_kernel
from labkit.kernels.filters import draw_filtered, is_filtered
from labkit.kernels.gumbel import row_keys
from labkit.kernels.jit import interpreted, jit, tl, triton
from labkit.kernels.tiles import power_of_two

TILE, TILES = 512, 8  # logits that a warp has in registers; tiles of a chunk
MAX_GROUPS = 4096  # groups of a row, for the second kernel's registers
GROUP_TILE = 2048  # logits of groups at once


@dataclass(slots=True)
class Changes:
    """What is added to a step's logits before the draw; None: nothing of the kind.

    seen and counts are one row a slot; the drawn token is entered for rows whose penalties are on.
    """

    adjustments: Tensor | None = None  # [3, N] int32 sorted by row: row, token, float32 bits; rows >= S are ignored
    seen: Tensor | None = None  # [slots, V] bool: in prompt or output
    counts: Tensor | None = None  # [slots, V] int32: how often in the output


def draw(
    logits: Tensor,
    parameters: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    filtered: bool = True,
    logprobs: bool = False,
    changes: Changes | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row.

    Args:
        logits: [S, V] float32 or 16 bits, the model's own. Left as they are.
        parameters: [slots, 10] int32, as `engine.sampler` describes them
        slots, positions: [S] int32: whose row it is, and the index in the sequence of the token to draw
        filtered: whether any row has top_k, top_p or min_p. Rows without are as fast either way.
        logprobs: whether to compute them, of the tokens under the raw logits

    Returns:
        (tokens [S] int64, log-probabilities [S] float32, undefined unless asked for)
    """
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    own = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return tokens, own
    assert logits.stride(1) == 1 and parameters.is_contiguous()
    changes = changes or Changes()
    changed = changes.counts is not None or changes.adjustments is not None
    chunks = triton.cdiv(vocab, TILE * TILES)
    group = max(32, power_of_two(triton.cdiv(vocab, MAX_GROUPS)))
    groups = triton.cdiv(vocab, group)
    # Of each chunk: best score, mass if filtered, largest raw logit, raw mass.
    parts = torch.empty(4, rows, chunks, dtype=torch.float32, device=device)
    winners = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    maxima = torch.empty(rows, groups if filtered else 0, dtype=torch.float32, device=device)
    listed = torch.empty(rows, groups if filtered else 0, dtype=torch.int32, device=device)
    source = torch.empty(rows, vocab, dtype=torch.float32, device=device) if changed else logits
    seen, counts = (slots if x is None else x for x in (changes.seen, changes.counts))
    adjustments = slots.unsqueeze(0) if changes.adjustments is None else changes.adjustments
    starts = slots if changes.adjustments is None else _starts(changes.adjustments, rows)
    state = (logits, source, logits.stride(0), source.stride(0), parameters, slots, positions, seen, counts)
    sizes = (rows, vocab, chunks, groups)
    options = {"FILTERED": filtered, "LOGPROBS": logprobs, "PENALTIES": changes.counts is not None, "GROUP": group}
    chunk_kernel[(rows, chunks)](
        *state,
        *(parts, winners, maxima, adjustments, adjustments.stride(0), starts),
        *sizes,
        **options,
        ADJUSTED=changes.adjustments is not None,
        TILE=TILE,
        TILES=TILES,
        FAST=not interpreted(),
        num_warps=1,
    )
    row_kernel[(rows,)](
        *state,
        *(parts, winners, maxima, listed, tokens, own),
        *sizes,
        **options,
        CHUNKS=power_of_two(chunks),
        GROUPS=power_of_two(groups),
        TILE=GROUP_TILE,
        num_warps=8 if filtered else 1,
    )
    return tokens, own


def _starts(adjustments: Tensor, rows: int) -> Tensor:
    """Where each row's adjustments begin, and the last one's end: [S + 1] int32."""
    bounds = torch.arange(rows + 1, dtype=torch.int32, device=adjustments.device)
    return torch.searchsorted(adjustments[0].contiguous(), bounds, out_int32=True)


@jit
def row_kernel(
    logits,
    source,
    logits_stride,
    source_stride,
    parameters,
    slots,
    positions,
    seen,
    counts,
    parts,
    winners,
    maxima,
    listed,
    tokens,
    own,
    rows,
    vocab,
    chunks,
    groups,
    FILTERED: tl.constexpr,
    LOGPROBS: tl.constexpr,
    PENALTIES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """From the chunks of one row to its token."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    parameters += slot * 10
    parts += row * chunks
    plane = rows * chunks
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    value = tl.load(parts + chunk, mask=there, other=float("-inf"))
    best = tl.max(value, 0)
    ids = tl.load(winners + row * chunks + chunk, mask=there, other=2147483647)
    token = tl.min(tl.where(there & (value == best), ids, 2147483647), 0)
    if FILTERED:  # noqa: SIM102 - known when compiling; the other is not
        if is_filtered(parameters, vocab):
            temperature = tl.load(parameters).to(tl.float32, bitcast=True)
            masses = tl.load(parts + plane + chunk, mask=there, other=0.0)
            k0, k1 = row_keys(parameters, tl.load(positions + row))
            token = draw_filtered(
                source + row.to(tl.int64) * source_stride,
                maxima + row * groups,
                listed + row * groups,
                tl.sum(masses * tl.exp((value - best) / temperature), 0),
                temperature,
                tl.load(parameters + 1).to(tl.float32, bitcast=True),
                tl.load(parameters + 2).to(tl.float32, bitcast=True),
                tl.load(parameters + 6),
                k0,
                k1,
                vocab,
                groups,
                GROUP,
                GROUPS,
                TILE,
            )
    tl.store(tokens + row, token.to(tl.int64))
    if LOGPROBS:
        raw_max = tl.load(parts + 2 * plane + chunk, mask=there, other=-3e38)
        raw_mass = tl.load(parts + 3 * plane + chunk, mask=there, other=0.0)
        top = tl.max(raw_max, 0)
        normaliser = top + tl.log(tl.sum(raw_mass * tl.exp(raw_max - top), 0))
        tl.store(own + row, tl.load(logits + row.to(tl.int64) * logits_stride + token).to(tl.float32) - normaliser)
    if PENALTIES:
        _enter(token, parameters, seen + slot * vocab, counts + slot * vocab)


@jit
def _enter(token, parameters, seen, counts):
    """Counts the drawn token, if the slot's request has penalties."""
    repetition = tl.load(parameters + 3).to(tl.float32, bitcast=True)
    presence = tl.load(parameters + 4).to(tl.float32, bitcast=True)
    frequency = tl.load(parameters + 5).to(tl.float32, bitcast=True)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        tl.store(counts + token, tl.load(counts + token) + 1)
        tl.store(seen + token, 1)
