"""The engines we measure ourselves against. Each runs the same workload on the same weights in the same session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from labkit.bench.workloads import Answer, Workload
from labkit.errors import LabkitError

PEERS = ("transformers", "llama.cpp", "vllm")


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


@dataclass(frozen=True)
class Terms:
    """What every peer is given, the same as our engine has.

    Attributes:
        path: the model, a folder or a .gguf file.
        longest: tokens of the longest request, prompt and output.
        streams: most requests at once.
        memory_share: of the GPU's memory, for weights, KV cache and activations together.
    """

    path: Path
    dtype: torch.dtype
    device: torch.device
    longest: int
    streams: int
    memory_share: float = 0.4


def open_peers(names: Sequence[str], terms: Terms) -> tuple[list[Engine], dict[str, str]]:
    """Load the peers of these names.

    Returns:
        Those that can run here, and for every one how it runs, or "not measured: why".
    """
    # Here, not above: they import this module. Each imports its own library when it is opened.
    from labkit.bench.peers.llama_cpp import LlamaCpp
    from labkit.bench.peers.transformers import Transformers
    from labkit.bench.peers.vllm import VLLM

    found: list[Engine] = []
    told: dict[str, str] = {}
    for kind in (Transformers, LlamaCpp, VLLM):
        if kind.name not in names:
            continue
        try:
            peer = kind(terms)
        except NotMeasuredError as error:
            told[kind.name] = str(error)
        else:
            found.append(peer)
            told[peer.name] = peer.how
    return found, told
