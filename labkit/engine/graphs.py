"""Whole steps as CUDA graphs: one launch instead of three hundred.

Steps of one size do the same every time, to other numbers. Such a step is recorded once, and from then on replayed as
a whole; the numbers are what lies in one small tensor:

    numbers ──▶ │ expand │ layers │ lm_head │ draw │ last tokens │ ──▶ tokens

There are two kinds. When everybody decodes, the size is the number of requests. When prompts are in the step, it is
the number of tokens. Both are padded to the next of a few sizes. What pads belongs to a slot that nobody has: all its
blocks are the scratch block, its tokens are drawn greedily, and no one looks at them.

Recording waits until a size is needed. It takes a fraction of a second, more when Triton has kernels to compile. All
graphs share one pool of memory, because one runs at a time and what it leaves there is copied out before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from labkit.engine.launched import host_buffer


@dataclass(slots=True)
class Recording:
    """A step of one size, and where its numbers go in and out."""

    numbers: Tensor  # int32
    tokens: Tensor  # [n]
    replay: Callable[[], None]


class StepGraphs:
    """Records steps and replays them."""

    def __init__(self, device: torch.device):
        self.recordings: dict[Hashable, Recording] = {}
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, key: Hashable, compute: Callable[[Tensor], Tensor], numbers: np.ndarray, idle: np.ndarray) -> Tensor:
        """Launches one step.

        Args:
            key: what the recording depends on: kind, size, and what else decides which kernels run
            compute: numbers on the device -> tokens [n]. Called when the key is new, to record it.
            numbers: int32, of the same shape for the same key
            idle: the same when there is nothing but padding, to record with

        Returns:
            [n], overwritten by the next run.
        """
        recording = self.recordings.get(key)
        if recording is None:
            recording = self.recordings[key] = self._record(compute, torch.from_numpy(idle).to(self._device))
        staging = host_buffer(numbers.size, self._device).view(numbers.shape)
        staging.numpy()[:] = numbers
        recording.numbers.copy_(staging, non_blocking=True)
        recording.replay()
        return recording.tokens

    def _record(self, compute: Callable[[Tensor], Tensor], numbers: Tensor) -> Recording:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute(numbers)  # compiles kernels, and lets cuBLAS take its memory
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            tokens = compute(numbers)
        return Recording(numbers, tokens, graph.replay)


def padded_sequences(count: int) -> int:
    """The size to which a batch of decodes is padded: 1, 2, 4, 8, 16, then in steps of 16."""
    return 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16


def padded_tokens(count: int) -> int:
    """The size to which a step with prompts is padded: in steps of 128 up to 1024, then of 256."""
    step = 128 if count <= 1024 else 256
    return -(-count // step) * step
