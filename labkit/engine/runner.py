"""Runs a step: one upload, one forward pass for everybody, one download.

A running request lives in a slot. What a step needs to know about it stays on the device, one row a slot: its block
table, its last token and (in the sampler) its parameters. So a step of pure decoding uploads a few numbers a request.

From what the host sends (`upload`) the device makes token ids, positions, places in the pool and block tables
(`expand`). A decode's token id is not sent: it is the last token, which the step before wrote into the slot. So a step
can be launched before the host has seen what the one before it drew.

Chunks are ordered decodes first; then the rows of the step are

    0 … decodes-1: one a decode │ first chunk of a prompt │ second chunk …

On a GPU most steps are replayed from CUDA graphs (`graphs`): those in which nobody wants more than a draw.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from labkit.config import GRAPH_TOKENS, EngineConfig
from labkit.engine.graphs import StepGraphs, padded_sequences, padded_tokens
from labkit.engine.launched import Launched, Logprobs, host_buffer
from labkit.engine.request import Chunk, Step
from labkit.engine.sampler import FILTERED, LOGPROBS, DrawPlan, Sampler
from labkit.engine.upload import Upload, decode_rows, mixed_numbers, new_blocks, num_targets, upload_parts
from labkit.kernels.attention_batch import AttentionBatch, PromptChunk
from labkit.kernels.expand import SLOT, START, expand, expand_decodes
from labkit.kernels.prefill_attention import Prompts, make_prompts
from labkit.models.decoder import Decoder, DecoderBatch

SORTED_FROM = 64  # decodes; fewer all start at once, and then a mixture of lengths spreads better
LOGPROB_ROWS = 256  # logits that prompt_logprobs holds at once; 50 MB with a vocabulary of 49,152


class Draw(Protocol):
    """How a step of decodes gets its tokens."""

    def __call__(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """[n, V], [n] int32, [n] int32 -> [n] int64"""


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
        self.max_num_seqs = config.max_num_seqs
        # One slot more than there are requests: that of padding, whose blocks are all the scratch block.
        slots = config.max_num_seqs + 1
        self._block_tables = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self._block_tables[-1] = num_blocks
        self._last_tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        self._sampler = Sampler(slots, shape.vocab_size, device, fused=model.fused)
        self._nobody = (slots - 1, 0, slots - 1, 0, num_blocks)  # a decode that pads
        self.graphs: StepGraphs | None = None
        if config.cuda_graphs and model.fused and device.type == "cuda":
            self.graphs = StepGraphs(device)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Starts to compute a step's tokens, and to draw where a chunk asks for it. A CPU has done it on return.

        Steps run in the order in which they are launched.
        """
        chunks = step.chunks
        drawing = chunks if all(chunk.draws for chunk in chunks) else [chunk for chunk in chunks if chunk.draws]
        decodes_only = chunks[-1].is_decode and not step.admitted
        if decodes_only and self.graphs is not None and len(chunks) > SORTED_FROM:
            # The longest context first: started last, it would be waited for.
            drawing = sorted(drawing, key=lambda chunk: -chunk.start)
        plan = self._sampler.plan(drawing, step.admitted)
        if decodes_only and plan.is_simple:
            return Launched(chunks, self._launch_decodes(plan), plan.chunks)
        if plan.is_simple and self._has_graph(step):
            return Launched(chunks, self._launch_mixed(step, plan), chunks)
        upload = Upload(*self._send_parts(upload_parts(chunks, step.admitted, plan)))
        self._admit(upload.blocks, upload.parameters, upload.history)
        hidden = self.model.forward(self._batch(chunks, upload), self.kv_cache)
        scores = self._score_prompts(chunks, hidden, upload.targets)
        tokens, logprobs = self._draw(hidden, plan, upload)
        return Launched(chunks, tokens, plan.chunks, logprobs, scores)

    # ------------------------------------------------------------------------------------- decodes alone

    def _launch_decodes(self, plan: DrawPlan) -> Tensor:
        """A step of decodes by requests that want nothing but a token: [n] on the device, in the order of the plan."""
        rows = decode_rows(plan.chunks, self._nobody)
        if self.graphs is None:
            draw = partial(self._sampler.draw, plan)
            return self._decode(self._send(rows), int(rows[START].max()) + 1, draw)
        count, size = rows.shape[1], padded_sequences(rows.shape[1])
        filtered = bool(plan.needs & FILTERED)
        draw = partial(self._sampler.draw_fused, filtered=filtered)
        idle = np.array(self._nobody, np.int32)[:, None].repeat(size, 1)
        numbers = idle.copy()
        numbers[:, :count] = rows
        compute = partial(self._decode, max_context=self.max_model_len, draw=draw)
        return self.graphs.run(("decode", size, filtered), compute, numbers, idle)[:count]

    def _decode(self, rows: Tensor, max_context: int, draw: Draw) -> Tensor:
        """[5, n] int32 -> tokens [n], which are the slots' last ones then."""
        self.model.select_backend()
        width = self._num_blocks(max_context)
        step = expand_decodes(rows, self._block_tables, self._last_tokens, self.block_size, width)
        attention = AttentionBatch(step.places, step.block_tables, step.context_lens, max_context)
        hidden = self.model.forward(DecoderBatch(step.token_ids, rows[START], attention), self.kv_cache)
        tokens = draw(self.model.logits(hidden), slots=rows[SLOT], positions=step.context_lens)
        self._last_tokens.index_copy_(0, rows[SLOT].long(), tokens.int())
        return tokens

    # ------------------------------------------------------------------------------------- with prompts, as a graph

    def _has_graph(self, step: Step) -> bool:
        return (
            self.graphs is not None
            and self.model.prefill_tile is not None
            and step.num_tokens <= GRAPH_TOKENS
            and all(chunk.seq.params.prompt_logprobs is None for chunk in step.chunks)
        )

    def _launch_mixed(self, step: Step, plan: DrawPlan) -> Tensor:
        """A step with prompts, by requests that want nothing but a token: [C], one a chunk, whether it draws or not."""
        assert self.graphs is not None
        parts = [new_blocks(step.chunks, step.admitted), plan.parameters, plan.history]
        if any(part.size for part in parts):
            self._admit(*self._send_parts(parts))
        size = padded_tokens(step.num_tokens)
        most = min(size, self.max_num_seqs)
        filtered = bool(plan.needs & FILTERED)
        tokens = self.graphs.run(
            ("mixed", size, filtered),
            partial(self._mixed, size=size, filtered=filtered),
            mixed_numbers(step.chunks, size, most, self._nobody[SLOT]),
            mixed_numbers([], size, most, self._nobody[SLOT]),
        )
        return tokens[: len(step.chunks)]

    def _mixed(self, numbers: Tensor, size: int, filtered: bool) -> Tensor:
        """Tokens [C], one a chunk, which are the slots' last ones then; of use where the chunk draws."""
        most = min(size, self.max_num_seqs)
        chunks, tokens, decodes = numbers.split((3 * (most + 1), size, 1))
        chunks = chunks.view(3, most + 1)
        step = expand(chunks, tokens, decodes, self._block_tables, self._last_tokens, self.block_size)
        slots, starts, lengths = chunks.unbind(0)
        tables, ends = self._block_tables.index_select(0, slots), starts + lengths
        # Any chunk may be a decode; for those that are none, a context of 0 makes the kernel leave at once.
        contexts = torch.where(torch.arange(most, device=self.device) < decodes, ends[:most], 0)
        prompts = self._prompts(tables, lengths, ends, decodes, size)
        attention = AttentionBatch(step.places, tables[:most], contexts, self.max_model_len, prompts=prompts)
        hidden = self.model.forward(DecoderBatch(step.token_ids, step.positions, attention), self.kv_cache)
        logits = self.model.logits(hidden.index_select(0, (step.ends[:most] - 1).clamp_(min=0)))
        drawn = self._sampler.draw_fused(logits, slots[:most], ends[:most], filtered)
        self._last_tokens.index_copy_(0, slots[:most].long(), drawn.int())
        return drawn

    def _prompts(
        self, tables: Tensor, lengths: Tensor, ends: Tensor, decodes: int | Tensor, rows: int
    ) -> Prompts | None:
        """All chunks of prompts for a kernel that takes them at once; None where there is no such kernel."""
        if self.model.prefill_tile is None:
            return None
        group = self.model.config.num_heads // self.model.config.num_kv_heads
        return make_prompts(self.model.prefill_tile, group, rows, tables, lengths, ends, decodes)

    # ------------------------------------------------------------------------------------- anything else

    def _send_parts(self, parts: list[np.ndarray]) -> list[Tensor]:
        """All of them to the device in one copy."""
        sizes = [part.size for part in parts]
        sections = self._send(np.concatenate([part.ravel() for part in parts])).split(sizes)
        return [section.view(part.shape) for section, part in zip(sections, parts, strict=True)]

    def _send(self, numbers: np.ndarray) -> Tensor:
        """int32 to the device; the host does not wait."""
        if self.device.type == "cpu":
            return torch.from_numpy(np.ascontiguousarray(numbers))
        staging = host_buffer(numbers.size, self.device).view(numbers.shape)
        staging.numpy()[:] = numbers
        return staging.to(self.device, non_blocking=True)

    def _admit(self, blocks: Tensor, parameters: Tensor, history: Tensor) -> None:
        """Enters new blocks [3, N] in the block tables, and what the sampler must know of fresh slots."""
        if blocks.numel():
            self._block_tables.index_put_((blocks[0].long(), blocks[1].long()), blocks[2])
        self._sampler.admit(parameters, history)

    def _batch(self, chunks: list[Chunk], upload: Upload) -> DecoderBatch:
        """What the model is told, for any mixture of chunks."""
        slots, starts, lengths = upload.chunks.unbind(0)
        decodes = sum(chunk.is_decode for chunk in chunks)
        step = expand(upload.chunks, upload.tokens, decodes, self._block_tables, self._last_tokens, self.block_size)
        max_context = max((chunk.start + 1 for chunk in chunks[:decodes]), default=0)
        prompts = None
        if decodes < len(chunks):
            tables = self._block_tables.index_select(0, slots)
            prompts = self._prompts(tables, lengths, starts + lengths, decodes, len(upload.tokens))
        return DecoderBatch(
            step.token_ids,
            step.positions,
            AttentionBatch(
                step.places,
                self._block_tables[:, : self._num_blocks(max_context)].index_select(0, slots[:decodes]),
                starts[:decodes] + 1,
                max_context,
                self._prompt_chunks(chunks, decodes),
                prompts,
            ),
        )

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

    def _draw(self, hidden: Tensor, plan: DrawPlan, upload: Upload) -> tuple[Tensor, Logprobs | None]:
        """The tokens of the plan's chunks, which are the slots' last ones then, and the log-probabilities asked for."""
        if not plan.chunks:
            return hidden.new_empty(0, dtype=torch.int64), None
        rows, drawing = upload.draws.unbind(0)
        slots, starts, lengths = upload.chunks.index_select(1, drawing).unbind(0)
        logits = self.model.logits(hidden.index_select(0, rows))
        tokens = self._sampler.draw(plan, logits, slots, starts + lengths, upload.adjustments, upload.penalised)
        self._last_tokens.index_copy_(0, slots.long(), tokens.int())
        if not plan.needs & LOGPROBS:
            return tokens, None
        asked = (chunk.seq.params.logprobs for chunk in plan.chunks)
        rows = upload.with_logprobs
        return tokens, Logprobs.of(
            logits.index_select(0, rows), tokens.index_select(0, rows), [count for count in asked if count is not None]
        )

    def _score_prompts(
        self, chunks: list[Chunk], hidden: Tensor, targets: Tensor
    ) -> list[tuple[Chunk, list[Logprobs]]]:
        """Log-probabilities of prompt tokens, a few hundred rows at a time."""
        out = []
        row = target = 0
        for chunk in chunks:
            wanted = chunk.seq.params.prompt_logprobs
            count = num_targets(chunk)
            if wanted is not None and not chunk.is_decode:
                found = []
                for begin in range(0, count, LOGPROB_ROWS):
                    size = min(LOGPROB_ROWS, count - begin)
                    logits = self.model.logits(hidden[row + begin : row + begin + size])
                    theirs = targets[target + begin : target + begin + size].long()
                    found.append(Logprobs.of(logits, theirs, [wanted] * size))
                out.append((chunk, found))
                target += count
            row += chunk.length
        return out


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory on a CPU until they are written (calloc), which torch.zeros would touch at once.

    They must be zeros: a masked place counts 0 × its value, and what lies in fresh memory may be no number.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
