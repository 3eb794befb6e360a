"""Decode steps as CUDA graphs: one launch instead of three hundred.

When everybody decodes, a step does the same every time, to other numbers. It is recorded once for a batch size, and
from then on replayed as a whole; the numbers are what lies in one small tensor:

    rows [5, n] ──▶ │ block tables │ expand │ layers │ lm_head │ draw │ last tokens │ ──▶ tokens [n]

Batches are padded to the next of a few sizes. A padding row is of a slot that nobody has: all its blocks are the
scratch block, its token is drawn greedily, and no one looks at it.

Recording waits until a size is needed. It takes a fraction of a second, more when Triton has kernels to compile. All
graphs share one pool of memory, because one runs at a time and what it leaves there is copied out before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Decode = Callable[[Tensor, bool], Tensor]  # rows [5, n] int32, whether any has filters -> tokens [n]; on the device
SLOT, START, TABLE_SLOT, TABLE_COLUMN, BLOCK = range(5)  # the rows' meaning; BLOCK goes to the place before it


@dataclass(slots=True)
class Recording:
    """A step of one size, and where its numbers go in and out."""

    rows: Tensor  # [5, n] int32
    tokens: Tensor  # [n]
    replay: Callable[[], None]


class DecodeGraphs:
    """Runs decode steps of any size.

    Args:
        padding: [5], a padding row
        most: rows of the largest batch
    """

    def __init__(self, padding: list[int], most: int, device: torch.device):
        self._padding = np.array(padding, np.int32)[:, None]
        self._device = device
        on_gpu = device.type == "cuda"
        # The GPU reads and writes these by itself. A step ends with a wait, so the next one may use them again.
        self._rows = torch.empty(5 * batch_size(most), dtype=torch.int32, pin_memory=on_gpu)
        self._tokens = torch.empty(batch_size(most), dtype=torch.int64, pin_memory=on_gpu)
        self._recordings: dict[tuple[int, bool], Recording] = {}
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._memory = torch.cuda.graph_pool_handle() if on_gpu else None

    def run(self, decode: Decode, rows: np.ndarray, filtered: bool) -> list[int]:
        """One step.

        Args:
            decode: what is recorded; the same at every call
            rows: [5, n]: slot, position, and the new block's slot, column and number (the padding's if there is none)
            filtered: whether any row has top_k, top_p or min_p

        Returns:
            The n tokens.
        """
        count = rows.shape[1]
        size = batch_size(count)
        recording = self._recordings.get((size, filtered))
        if recording is None:
            recording = self._recordings[size, filtered] = self._record(decode, size, filtered)
        staging = self._rows[: 5 * size].view(5, size)
        numbers = staging.numpy()
        numbers[:, :count] = rows
        numbers[:, count:] = self._padding
        recording.rows.copy_(staging, non_blocking=True)
        recording.replay()
        tokens = self._tokens[:count]
        tokens.copy_(recording.tokens[:count], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()
        return tokens.tolist()

    def _record(self, decode: Decode, size: int, filtered: bool) -> Recording:
        rows = torch.from_numpy(self._padding).repeat(1, size).to(self._device)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            decode(rows, filtered)  # compiles kernels, and lets cuBLAS take its memory
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            tokens = decode(rows, filtered)
        return Recording(rows, tokens, graph.replay)


def batch_size(count: int) -> int:
    """The size to which a batch is padded: 1, 2, 4, 8, 16, then in steps of 16."""
    return 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16
