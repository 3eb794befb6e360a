"""Runs a step: one upload, one forward pass for everybody, one download.

A running request lives in a slot. What a step needs to know about it stays on the device, one row a slot: its block
table, its last token and (in the sampler) its parameters. So a step of pure decoding uploads three numbers a request.

What the host sends, as int32, in one pinned buffer and one copy:

    ┌──────────────────┬─────────────┬──────────────────┬────────┬─────────┬──────────────────────────────┐
    │ chunks           │ draws       │ new blocks       │ tokens │ targets │ sampler's                    │
    │ slot[C] start[C] │ row[S]      │ slot[N] index[N] │ of the │ of      │ parameters, history          │
    │ length[C]        │ chunk[S]    │ block[N]         │ prompts│ prompt  │ (fresh slots), adjustments,  │
    │                  │             │                  │        │ logprobs│ rows with penalties/logprobs │
    └──────────────────┴─────────────┴──────────────────┴────────┴─────────┴──────────────────────────────┘

From these the device makes token ids, positions, slot mapping, lengths and block tables ("expand"). A decode's token
id is not uploaded: it is the last token, which the step before wrote into the slot.

Chunks are ordered decodes first; then the rows of the step are

    0 … decodes-1: one a decode │ first chunk of a prompt │ second chunk …
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from labkit.config import EngineConfig
from labkit.engine.graphs import BLOCK, SLOT, START, TABLE_COLUMN, TABLE_SLOT, DecodeGraphs
from labkit.engine.request import Chunk, ChunkResult, Sequence, Step, TokenLogprobs
from labkit.engine.sampler import FILTERED, LOGPROBS, DrawPlan, Sampler, token_logprobs
from labkit.kernels.attention import AttentionBatch, PromptChunk
from labkit.kernels.prefill_attention import Prompts, make_prompts
from labkit.models.decoder import Decoder, DecoderBatch

LOGPROB_ROWS = 256  # logits that prompt_logprobs holds at once; 50 MB with a vocabulary of 49,152


@dataclass(slots=True)
class Upload:
    """The staging buffer's sections, on the device."""

    chunks: Tensor  # [3, C]: slot, start, length
    draws: Tensor  # [2, S]: row among the step's tokens, number of its chunk
    blocks: Tensor  # [3, N]: slot, index in the block table, block
    tokens: Tensor  # [P]: of the chunks that are no decodes
    targets: Tensor  # [L]: the tokens that prompt_logprobs are asked for
    parameters: Tensor  # the rest as in DrawPlan
    history: Tensor
    adjustments: Tensor
    penalised: Tensor
    with_logprobs: Tensor


class Runner:
    """Owns the KV pool and the slots, and nothing else does.

    Args:
        num_blocks: blocks of the pool. One more is allocated behind them, for padding to write into.
        max_model_len: tokens of the longest sequence, for the width of the block tables.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.model = model
        self.device = device
        self.block_size = config.block_size
        shape = model.config
        self.kv_cache = _zeros(
            (shape.num_layers, 2, num_blocks + 1, self.block_size, shape.num_kv_heads, shape.head_dim), dtype, device
        )
        self.kv_bytes = self.kv_cache.nbytes
        width = -(-max_model_len // self.block_size)
        self.max_model_len = max_model_len
        # One slot more than there are requests: that of padding, whose blocks are all the scratch block.
        slots = config.max_num_seqs + 1
        self._block_tables = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self._block_tables[-1] = num_blocks
        self._last_tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        self._sampler = Sampler(slots, shape.vocab_size, device, fused=model.backend == "triton")
        self._padding = [slots - 1, 0, slots - 1, 0, num_blocks]
        self._graphs: DecodeGraphs | None = None
        if config.cuda_graphs and model.backend == "triton" and device.type == "cuda":
            self._graphs = DecodeGraphs(self._padding, config.max_num_seqs, device)
        self._staging = torch.empty(0, dtype=torch.int32)
        # When the GPU has read the staging buffer: a step that draws nothing does not wait for it otherwise.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    @torch.inference_mode()
    def execute(self, step: Step) -> list[ChunkResult]:
        """Computes a step's tokens and draws where a chunk asks for it.

        Returns:
            One result a chunk, in the order of the step's chunks.
        """
        # The order that attention wants; Python's sort is stable, and the scheduler's order is this one already.
        chunks = sorted(step.chunks, key=lambda chunk: not chunk.is_decode)
        plan = self._sampler.plan([chunk for chunk in chunks if chunk.draws], step.admitted)
        if self._graphs is not None and chunks[-1].is_decode and not step.admitted and plan.is_simple:
            tokens = self._graphs.run(self._decode, self._decode_rows(plan.chunks), bool(plan.needs & FILTERED))
            drawn = {id(chunk): ChunkResult(token) for chunk, token in zip(plan.chunks, tokens, strict=True)}
            return [drawn[id(chunk)] for chunk in step.chunks]
        upload = self._upload(chunks, step.admitted, plan)
        if upload.blocks.numel():
            self._block_tables.index_put_((upload.blocks[0].long(), upload.blocks[1].long()), upload.blocks[2])
        self._sampler.admit(upload.parameters, upload.history)

        batch = self._expand(chunks, upload)
        hidden = self.model.forward(batch, self.kv_cache)
        results = {id(chunk): ChunkResult(None) for chunk in chunks}
        self._score_prompts(chunks, hidden, upload.targets, results)
        if plan.chunks:
            self._draw(hidden, plan, upload, results)
        return [results[id(chunk)] for chunk in step.chunks]

    def _decode_rows(self, chunks: list[Chunk]) -> np.ndarray:
        """What `_decode` is told of chunks that are all decodes: [5, n], as in `graphs`."""
        nothing = self._padding[TABLE_SLOT:]
        rows = [
            (chunk.seq.slot, chunk.start, *nothing)
            if not chunk.new_blocks
            else (chunk.seq.slot, chunk.start, chunk.seq.slot, len(chunk.seq.block_table) - 1, chunk.new_blocks[0])
            for chunk in chunks
        ]
        return np.array(rows, np.int32).T

    def _decode(self, rows: Tensor, filtered: bool) -> Tensor:
        """A step of decodes alone, by requests that want nothing but a token: [5, n] int32 -> [n]. What graphs hold."""
        slots, starts = rows[SLOT], rows[START]
        self._block_tables.index_put_((rows[TABLE_SLOT].long(), rows[TABLE_COLUMN].long()), rows[BLOCK])
        ends = starts + 1
        attention = AttentionBatch(
            self._places(slots, starts), self._block_tables.index_select(0, slots), ends, self.max_model_len
        )
        batch = DecoderBatch(self._last_tokens.index_select(0, slots), starts, attention)
        logits = self.model.logits(self.model.forward(batch, self.kv_cache))
        tokens = self._sampler.draw_fused(logits, slots, ends, filtered)
        self._last_tokens.index_copy_(0, slots.long(), tokens.int())
        return tokens

    def _places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where keys and values of these tokens [T] go: [T] int64, in tokens from the pool's start."""
        blocks = self._block_tables[slots.long(), (positions // self.block_size).long()]
        return blocks.long() * self.block_size + positions % self.block_size

    def _upload(self, chunks: list[Chunk], admitted: list[Sequence], plan: DrawPlan) -> Upload:
        """Fills the staging buffer and copies it to the device."""
        number = {id(chunk): index for index, chunk in enumerate(chunks)}
        lengths = np.array([chunk.length for chunk in chunks], np.int32)
        ends = np.cumsum(lengths)
        drawing = np.array([number[id(chunk)] for chunk in plan.chunks], np.int32)
        tokens: list[int] = []
        targets: list[int] = []
        for chunk in chunks:
            if not chunk.is_decode:
                tokens += chunk.seq.token_ids(chunk.start, chunk.start + chunk.length)
                targets += chunk.seq.prompt_token_ids[chunk.start + 1 :][: _num_targets(chunk)]
        parts = [
            np.array([[chunk.seq.slot for chunk in chunks], [chunk.start for chunk in chunks], lengths], np.int32),
            np.array([ends[drawing] - 1, drawing], np.int32),
            _new_blocks(chunks, admitted),
            np.array(tokens, np.int32),
            np.array(targets, np.int32),
            plan.parameters,
            plan.history,
            plan.adjustments,
            plan.penalised,
            plan.with_logprobs,
        ]
        sizes = [part.size for part in parts]
        staging = self._staging_buffer(sum(sizes))
        np.concatenate([part.ravel() for part in parts], out=staging.numpy())
        sections = staging.to(self.device, non_blocking=True).split(sizes)
        if self._copied is not None:
            self._copied.record()
        return Upload(*(section.view(part.shape) for section, part in zip(sections, parts, strict=True)))

    def _staging_buffer(self, size: int) -> Tensor:
        """`size` numbers of host memory that the GPU can read by itself; the same every step."""
        if self._copied is not None:
            self._copied.synchronize()
        if len(self._staging) < size:
            self._staging = torch.empty(2 * size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        return self._staging[:size]

    def _expand(self, chunks: list[Chunk], upload: Upload) -> DecoderBatch:
        """From slots and lengths to ids, positions and places in the pool, on the device."""
        slots, starts, lengths = upload.chunks.unbind(0)
        decodes = sum(chunk.is_decode for chunk in chunks)
        token_ids = self._last_tokens.index_select(0, slots[:decodes])
        total = decodes
        if decodes == len(chunks):
            token_slots, positions = slots, starts.clone()
        else:
            token_ids = torch.cat((token_ids, upload.tokens))
            total = len(token_ids)
            owner = torch.repeat_interleave(lengths, output_size=total)  # [T]: the chunk of each row
            first_rows = lengths.cumsum(0) - lengths
            rows = torch.arange(total, device=self.device)
            positions = (rows + (starts - first_rows).index_select(0, owner)).int()
            token_slots = slots.index_select(0, owner)
        max_context = max((chunk.start + 1 for chunk in chunks[:decodes]), default=0)
        return DecoderBatch(
            token_ids,
            positions,
            AttentionBatch(
                self._places(token_slots, positions),
                self._block_tables[:, : self._num_blocks(max_context)].index_select(0, slots[:decodes]),
                starts[:decodes] + 1,
                max_context,
                self._prompt_chunks(chunks, decodes),
                self._prompts(decodes, total - decodes, upload) if decodes < len(chunks) else None,
            ),
        )

    def _prompts(self, decodes: int, rows: int, upload: Upload) -> Prompts | None:
        """All chunks of prompts, `rows` tokens, for a kernel that takes them at once."""
        tile = self.model.prefill_tile
        if tile is None:
            return None
        slots, starts, lengths = upload.chunks[:, decodes:].unbind(0)
        group = self.model.config.num_heads // self.model.config.num_kv_heads
        return make_prompts(tile, group, rows, self._block_tables.index_select(0, slots), lengths, starts + lengths)

    def _prompt_chunks(self, chunks: list[Chunk], decodes: int) -> list[PromptChunk]:
        out = []
        row = decodes
        for chunk in chunks[decodes:]:
            table = self._block_tables[chunk.seq.slot, : self._num_blocks(chunk.start + chunk.length)]
            out.append(PromptChunk(row, chunk.start, chunk.length, table))
            row += chunk.length
        return out

    def _num_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _draw(self, hidden: Tensor, plan: DrawPlan, upload: Upload, results: dict[int, ChunkResult]) -> None:
        """Logits of the rows that draw, their tokens into the slots and into the results."""
        rows, drawing = upload.draws.unbind(0)
        slots, starts, lengths = upload.chunks.index_select(1, drawing).unbind(0)
        logits = self.model.logits(hidden.index_select(0, rows))
        tokens = self._sampler.draw(logits, plan, slots, starts + lengths, upload.adjustments, upload.penalised)
        self._last_tokens.index_copy_(0, slots.long(), tokens.int())
        for chunk, token in zip(plan.chunks, tokens.tolist(), strict=True):
            results[id(chunk)].token = token
        if plan.needs & LOGPROBS:
            asked = [chunk for chunk in plan.chunks if chunk.seq.params.logprobs is not None]
            wanted = [chunk.seq.params.logprobs or 0 for chunk in asked]
            rows = upload.with_logprobs
            found = token_logprobs(logits.index_select(0, rows), tokens.index_select(0, rows), wanted)
            for chunk, logprobs in zip(asked, found, strict=True):
                results[id(chunk)].logprobs = logprobs

    def _score_prompts(
        self, chunks: list[Chunk], hidden: Tensor, targets: Tensor, results: dict[int, ChunkResult]
    ) -> None:
        """Log-probabilities of prompt tokens, a few hundred rows at a time."""
        row = target = 0
        for chunk in chunks:
            wanted = chunk.seq.params.prompt_logprobs
            count = _num_targets(chunk)
            if wanted is not None and not chunk.is_decode:
                found: list[TokenLogprobs] = []
                for begin in range(0, count, LOGPROB_ROWS):
                    size = min(LOGPROB_ROWS, count - begin)
                    logits = self.model.logits(hidden[row + begin : row + begin + size])
                    theirs = targets[target + begin : target + begin + size].long()
                    found += token_logprobs(logits, theirs, [wanted] * size)
                results[id(chunk)].prompt_logprobs = found
                target += count
            row += chunk.length


def _num_targets(chunk: Chunk) -> int:
    """How many of the chunk's rows predict a prompt token whose log-probability is asked for."""
    if chunk.seq.params.prompt_logprobs is None:
        return 0
    return max(0, min(chunk.length, chunk.seq.num_prompt_tokens - 1 - chunk.start))


def _new_blocks(chunks: list[Chunk], admitted: list[Sequence]) -> np.ndarray:
    """What changes in the block tables: [3, N] of slot, index, block. A fresh slot gets its whole table."""
    entries = [(seq.slot, index, block) for seq in admitted for index, block in enumerate(seq.block_table)]
    fresh = {id(seq) for seq in admitted}
    for chunk in chunks:
        if chunk.new_blocks and id(chunk.seq) not in fresh:
            first = len(chunk.seq.block_table) - len(chunk.new_blocks)
            entries += [(chunk.seq.slot, first + i, block) for i, block in enumerate(chunk.new_blocks)]
    return np.array(entries, np.int32).reshape(-1, 3).T


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory on a CPU until they are written (calloc), which torch.zeros would touch at once.

    They must be zeros: a masked place counts 0 × its value, and what lies in fresh memory may be no number.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
