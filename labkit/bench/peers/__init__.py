"""The engines we measure ourselves against. Each runs the same workload on the same weights in the same process."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from labkit.bench.workloads import Answer, Workload
from labkit.errors import LabkitError


class NotMeasuredError(LabkitError):
    """A peer cannot run here, or cannot run this workload; the message says why and goes into the record."""


class Engine(Protocol):
    """What the measurement asks of an engine, ours and a peer alike."""

    name: str
    dtype: str
    how: str  # version and how it runs, for the record

    def run(self, workload: Workload) -> Answer:
        """Run all of it once.

        Raises:
            NotMeasuredError: this engine cannot run such a workload.
        """
        ...

    def close(self) -> None: ...


def open_peers(path: Path, dtype: torch.dtype, device: torch.device, longest: int, streams: int) -> list[Engine | str]:
    """Load every peer on the model at `path`; one that cannot run here is "name: why" instead.

    Args:
        longest: tokens of the longest request, prompt and output.
        streams: most requests at once.
    """
    # Here, not above: importing transformers takes seconds, and neither has to be installed.
    from labkit.bench.peers.llama_cpp import LlamaCpp
    from labkit.bench.peers.transformers import Transformers

    found: list[Engine | str] = []
    for peer in (Transformers, LlamaCpp):
        try:
            found.append(peer(path, dtype, device, longest, streams))
        except NotMeasuredError as error:
            found.append(f"{peer.name}: {error}")
    return found
