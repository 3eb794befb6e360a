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


def open_peers(
    path: Path, dtype: torch.dtype, device: torch.device, longest: int, streams: int
) -> tuple[list[Engine], dict[str, str]]:
    """Load every peer on the model at `path`.

    Args:
        longest: tokens of the longest request, prompt and output.
        streams: most requests at once.

    Returns:
        Those that can run here, and for every one how it runs, or "not measured: why".
    """
    # Here, not above: importing transformers takes seconds, and neither has to be installed.
    from labkit.bench.peers.llama_cpp import LlamaCpp
    from labkit.bench.peers.transformers import Transformers

    found: list[Engine] = []
    told: dict[str, str] = {}
    for kind in (Transformers, LlamaCpp):
        try:
            peer = kind(path, dtype, device, longest, streams)
        except NotMeasuredError as error:
            told[kind.name] = str(error)
        else:
            found.append(peer)
            told[peer.name] = peer.how
    return found, told
