"""A step that runs on the device while the host does something else, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.engine.request import Chunk, ChunkResult, TokenLogprobs
from labkit.kernels import sampling


@dataclass(slots=True)
class Logprobs:
    """What the model itself thinks of some tokens, on its way to the host."""

    tokens: Tensor  # [S]
    columns: tuple[Tensor, ...]  # what `sampling.log_probabilities` returns
    wanted: list[int]  # of each row: how many of the k best

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, wanted: list[int]) -> Logprobs:
        """Of tokens [S], given the model's logits [S, V]."""
        columns = sampling.log_probabilities(logits.float(), tokens, max(wanted))
        return cls(to_host(tokens), tuple(map(to_host, columns)), wanted)

    def rows(self) -> list[TokenLogprobs]:
        """One a token; the device must be done."""
        columns = (self.tokens.tolist(), *(column.tolist() for column in self.columns))
        return [
            TokenLogprobs(token, logprob, rank, best[:k], best_logprobs[:k])
            for token, logprob, rank, best, best_logprobs, k in zip(*columns, self.wanted, strict=True)
        ]


class Launched:
    """A step in flight.

    Args:
        chunks: the step's
        tokens: [n] on the device, one for each of `drawing`
        drawing: the chunks that draw, or all of them
        logprobs: of those of `drawing` that want some
        scores: of prompts: (chunk, piece by piece)
    """

    def __init__(
        self,
        chunks: list[Chunk],
        tokens: Tensor,
        drawing: list[Chunk],
        logprobs: Logprobs | None = None,
        scores: list[tuple[Chunk, list[Logprobs]]] | None = None,
    ):
        self._chunks = chunks
        self._tokens = to_host(tokens)
        self._drawing = drawing
        self._logprobs = logprobs
        self._scores = scores or []
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def results(self) -> list[ChunkResult]:
        """Waits for this step, not for those launched after it. One result a chunk, in the order of the chunks."""
        if self._done is not None:
            self._done.synchronize()
        tokens = self._tokens.tolist()
        if self._drawing is not self._chunks:
            drawn = {id(chunk): token for chunk, token in zip(self._drawing, tokens, strict=True)}
            tokens = [drawn.get(id(chunk)) for chunk in self._chunks]
        pairs = zip(self._chunks, tokens, strict=True)
        results = [ChunkResult(token if chunk.draws else None) for chunk, token in pairs]
        if self._logprobs is not None or self._scores:
            self._add_logprobs({id(chunk): result for chunk, result in zip(self._chunks, results, strict=True)})
        return results

    def _add_logprobs(self, results: dict[int, ChunkResult]) -> None:
        if self._logprobs is not None:
            asked = [chunk for chunk in self._drawing if chunk.seq.params.logprobs is not None]
            for chunk, logprobs in zip(asked, self._logprobs.rows(), strict=True):
                results[id(chunk)].logprobs = logprobs
        for chunk, pieces in self._scores:
            results[id(chunk)].prompt_logprobs = [row for piece in pieces for row in piece.rows()]


def to_host(tensor: Tensor) -> Tensor:
    """The same on the host. From a GPU it is a copy that is complete once the work launched so far is done."""
    if not tensor.is_cuda:
        return tensor
    # PyTorch keeps page-locked memory for us, and does not hand it out again before the copy is done.
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)


def host_buffer(size: int, device: torch.device) -> Tensor:
    """[size] int32 that the device can read by itself."""
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
