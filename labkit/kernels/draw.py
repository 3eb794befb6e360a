"""A step's whole draw in two Triton kernels, or three: `sampling` is the definition, row by row.

    logits [S, V] ──▶ first kernel, one program a chunk of a row          second kernel, one program a row
                      ├ bias, min_tokens, penalties (if any, into a copy)
                      ├ log-sum-exp of the raw logits (if asked)   ──────▶ log-probability of the token
                      ├ plain row:    bound of logits/T + noise    ──────▶ exact best of the chunks that can hold it
                      └ filtered row: largest of each small group  ──────▶ what the filters keep, best of it (`filters`)

A filtered row of which too many tokens matter (`filters` says when) is left to a third kernel, `draw_flat`.

The bound (`gumbel`) costs a fraction of the exact noise, and seldom can more than one chunk hold a row's best score.
A greedy row is a plain row without noise. Parameters are read from the slots' rows on the device, so nothing waits for
the host and a CUDA graph can hold it all.

Letters: S rows that draw, V vocabulary, C chunks of a row, N adjustments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.kernels.draw_chunks import chunk_kernel
from labkit.kernels.draw_end import finish
from labkit.kernels.draw_flat import flat_kernel
from labkit.kernels.filters import draw_filtered, is_filtered, needs_mass
from labkit.kernels.gumbel import noise, noise_bits, row_keys
from labkit.kernels.jit import interpreted, jit, tl, triton
from labkit.kernels.launch import dependent
from labkit.kernels.tiles import power_of_two

TILE, WARPS = 4096, 4  # logits of a chunk, and the warps that have them in registers
ROW_WARPS = 8  # of the second kernel, and of the third
FLAT_REGISTERS = 128  # of a thread of the third kernel: two programs fit a multiprocessor at once, as of the second
MAX_GROUPS = 4096  # groups of a row, for its registers
GROUP_TILE = 2048  # logits of groups at once, and listed tokens of a flat row
FEW = 256  # listed tokens of any other row


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
    chunks = triton.cdiv(vocab, TILE)
    group = max(32, power_of_two(triton.cdiv(vocab, MAX_GROUPS)))
    groups = triton.cdiv(vocab, group)
    # Of each chunk: bound of the best score (filtered: largest logit), mass if filtered, largest raw logit, raw mass.
    parts = torch.empty(4, rows, chunks, dtype=torch.float32, device=device)
    maxima = torch.empty(rows, groups if filtered else 0, dtype=torch.float32, device=device)
    listed = torch.empty(rows, 2 * groups + 3 if filtered else 0, dtype=torch.int32, device=device)
    source = torch.empty(rows, vocab, dtype=torch.float32, device=device) if changed else logits
    seen, counts = (slots if x is None else x for x in (changes.seen, changes.counts))
    adjustments = slots.unsqueeze(0) if changes.adjustments is None else changes.adjustments
    starts = slots if changes.adjustments is None else _starts(changes.adjustments, rows)
    state = (logits, source, logits.stride(0), source.stride(0), parameters, slots, positions, seen, counts)
    sizes = (rows, vocab, chunks, groups)
    options = {"LOGPROBS": logprobs, "PENALTIES": changes.counts is not None, "GROUP": group} | dependent(device)
    row_options = options | {"CHUNKS": power_of_two(chunks), "GROUPS": power_of_two(groups), "GROUP_TILE": GROUP_TILE}
    row_options["num_warps"] = ROW_WARPS
    chunk_kernel[(chunks, rows)](
        *state,
        *(parts, maxima, adjustments, adjustments.stride(0), starts),
        *sizes,
        **options,
        FILTERED=filtered,
        ADJUSTED=changes.adjustments is not None,
        TILE=TILE,
        FAST=not interpreted(),
        num_warps=WARPS,
    )
    results = (parts, maxima, listed, tokens, own)
    row_kernel[(rows,)](*state, *results, *sizes, **row_options, FILTERED=filtered, TILE=TILE, FEW=FEW)
    if filtered:
        flat_kernel[(rows,)](*state, *results, *sizes, **row_options, maxnreg=FLAT_REGISTERS)
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
    PDL: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    """From the chunks of one row to its token, or -1 if it is left to `flat_kernel`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    parameters += slot * 10
    parts += row * chunks
    plane = rows * chunks
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    part = tl.load(parts + chunk, mask=there, other=float("-inf"))
    source += row.to(tl.int64) * source_stride
    temperature = tl.load(parameters).to(tl.float32, bitcast=True)
    k0, k1 = row_keys(parameters, tl.load(positions + row))
    token = tl.zeros((), tl.int32)
    filtered = False
    if FILTERED:
        filtered = is_filtered(parameters, vocab)
    if filtered:
        mass = tl.zeros((), tl.float32)
        if needs_mass(parameters, vocab):
            masses = tl.load(parts + plane + chunk, mask=there, other=0.0)
            mass = tl.sum(masses * tl.exp((part - tl.max(part, 0)) / temperature), 0)
        maxima += row * groups
        listed += row * (2 * groups + 3)
        token = draw_filtered(
            source, maxima, listed, mass, parameters, k0, k1, vocab, groups, GROUP, GROUPS, GROUP_TILE, FEW
        )
    else:
        token = _draw_plain(source, part, temperature, k0, k1, vocab, CHUNKS, TILE)
    if token < 0:
        tl.store(tokens + row, -1)
        return
    logits += row.to(tl.int64) * logits_stride
    seen += slot * vocab
    counts += slot * vocab
    finish(token, row, logits, parameters, seen, counts, parts, tokens, own, rows, chunks, LOGPROBS, PENALTIES, CHUNKS)


@jit
def _draw_plain(source, bounds, temperature, k0, k1, vocab, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """The id of the largest logit / temperature + noise, the lowest on a tie; without noise if greedy.

    Looks into the chunk with the largest bound first, and then only into those whose bound reaches what it found.
    """
    sampled = temperature > 0.0
    scale = tl.where(sampled, temperature, 1.0)
    best = float("-inf") + tl.zeros((), tl.float32)
    token = tl.zeros((), tl.int32)
    limit = best
    top = tl.max(bounds, 0)
    while top > limit:
        chunk = tl.min(tl.where(bounds == top, tl.arange(0, CHUNKS), CHUNKS), 0)
        ids = chunk * TILE + tl.arange(0, TILE)
        value = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        score = tl.div_rn(value, scale + tl.zeros_like(value))
        if sampled:
            score += noise(noise_bits(k0, k1, ids))
        high = tl.max(score, 0)
        first = tl.min(tl.where(score == high, ids, 2147483647), 0)
        if (high > best) | ((high == best) & (first < token)):
            best = high
            token = first
        # A bound may be this much too low; a greedy row's is exact, and of equal ones the first chunk came first.
        limit = best - tl.where(sampled, 1e-3 + 1e-6 * tl.abs(best), 0.0)
        bounds = tl.where(tl.arange(0, CHUNKS) == chunk, float("-inf"), bounds)
        top = tl.max(bounds, 0)
    return token
