"""The servers that are asked: ours and vLLM's, started here and ended here, or one that runs already."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import psutil

import labkit
from labkit.bench.load.client import Target
from labkit.bench.peers import NotMeasuredError
from labkit.bench.peers.vllm import ENVIRONMENT as VLLM_ENVIRONMENT
from labkit.bench.record import OURS
from labkit.errors import LabkitError

SECONDS_TO_LOAD = 900.0  # vLLM compiles the model when it starts
SECONDS_TO_END = 30.0
SECONDS_BETWEEN_LOOKS = 0.2
LAST_LINES = 20  # of its log, when a server dies


class Remote:
    """A server that somebody else runs.

    Attributes:
        name: of the engine, for tables.
        how: version and options, for the record.
    """

    def __init__(self, name: str, how: str, target: Target):
        self.name, self.how, self.target = name, how, target

    def metrics(self) -> str:
        """Its /metrics; empty if it has none."""
        try:
            headers = {"Authorization": f"Bearer {self.target.key}"}
            answer = httpx.get(f"{self.target.url}/metrics", headers=headers, timeout=10.0)
        except httpx.HTTPError:
            return ""
        return answer.text if answer.status_code == 200 else ""

    def close(self) -> None:
        """It is not ours to end."""


class Server(Remote):
    """A server in processes of its own, which end with `close`.

    Args:
        ready_path: answers 200 once the model is loaded.

    Raises:
        LabkitError: it ends before it is ready, with its last words, or takes too long.
    """

    def __init__(
        self,
        name: str,
        how: str,
        target: Target,
        command: Sequence[str],
        ready_path: str,
        environment: Mapping[str, str] | None = None,
    ):
        super().__init__(name, how, target)
        with tempfile.NamedTemporaryFile(prefix=f"labkit-{name}-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            self._process = psutil.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
            )
        try:
            self._wait_until_ready(self.target.url + ready_path)
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, url: str) -> None:
        until = time.monotonic() + SECONDS_TO_LOAD
        while time.monotonic() < until:
            if self._process.poll() is not None:
                tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])
                raise LabkitError(f"the server of {self.name} ended while it started; its last words:\n{tail}")
            try:
                if httpx.get(url, timeout=5.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # it does not listen yet
            time.sleep(SECONDS_BETWEEN_LOOKS)
        raise LabkitError(f"the server of {self.name} was not ready after {SECONDS_TO_LOAD:.0f} s")

    def family(self) -> list[psutil.Process]:
        """Its processes; empty if it has ended."""
        try:
            return [psutil.Process(self._process.pid), *self._process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """End all of its processes. A second call does nothing."""
        family = self.family()
        if self._process.poll() is None:
            self._process.terminate()
        _, left = psutil.wait_procs(family, SECONDS_TO_END)
        for process in left:
            process.kill()
        self._process.wait()
        self._log.unlink(missing_ok=True)


@dataclass(frozen=True)
class Place:
    """Where and how a server of a model is started.

    Attributes:
        model: as the user named it; for vLLM, a folder.
        name: that requests ask for.
        max_num_seqs: requests in a step, at most.
        memory_share: of the GPU.
        prefix_caching: whether prompts that begin alike are computed once.
    """

    model: str
    name: str
    dtype: str
    max_num_seqs: int
    max_model_len: int
    memory_share: float
    prefix_caching: bool
    key: str
    api: str


def engine_fields(place: Place) -> dict[str, Any]:
    """Of EngineConfig; vLLM calls them the same."""
    return {
        "dtype": place.dtype,
        "max_model_len": place.max_model_len,
        "max_num_seqs": place.max_num_seqs,
        "gpu_memory_utilization": place.memory_share,
        "enable_prefix_caching": place.prefix_caching,
    }


def start_ours(place: Place, options: Mapping[str, Any]) -> Server:
    """`labkit serve` with these fields of EngineConfig, on any free port."""
    fields = {**engine_fields(place), **options}
    target = Target(f"http://127.0.0.1:{free_port()}", place.name, place.key, place.api)
    port = target.url.rpartition(":")[2]
    command = [sys.executable, "-m", "labkit", "serve", place.model, "--port", port, "--served-model-name", place.name]
    command += ["--log-level", "warning", *as_options(fields)]
    # In the environment a key is not seen in the list of processes.
    environment = {"LABKIT_API_KEY": place.key} if place.key != Target.key else {}
    how = f"{labkit.__version__}, labkit serve {' '.join(as_options(fields))}"
    return Server(OURS, how, target, command, "/ready", environment)


def as_options(fields: Mapping[str, Any]) -> list[str]:
    """{"max_num_seqs": 8, "cuda_graphs": False} as --max-num-seqs=8 --no-cuda-graphs."""
    out = []
    for name, value in fields.items():
        kebab = name.replace("_", "-")
        if value is True or value is False:
            out.append(f"--{kebab}" if value else f"--no-{kebab}")
        elif value is not None:
            out.append(f"--{kebab}={value}")
    return out


def start_vllm(place: Place) -> Server:
    """vLLM's own server, in the same dtype and with the same length and share of memory.

    Raises:
        NotMeasuredError: vLLM is not installed, or does not start.
    """
    if importlib.util.find_spec("vllm") is None:
        raise NotMeasuredError("not measured: vllm is not installed here; pip install vllm")
    if place.model.endswith(".gguf"):
        raise NotMeasuredError("not measured: it is compared on folders of safetensors, not on a GGUF file")
    options = as_options(engine_fields(place))
    target = Target(f"http://127.0.0.1:{free_port()}", place.name, place.key, place.api)
    port = target.url.rpartition(":")[2]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", place.model]
    command += ["--served-model-name", place.name, "--host", "127.0.0.1", "--port", port, *options]
    how = f"{metadata.version('vllm')}, its OpenAI server {' '.join(options)}"
    try:
        return Server("vllm", how, target, command, "/health", {**VLLM_ENVIRONMENT, "VLLM_API_KEY": place.key})
    except LabkitError as error:
        raise NotMeasuredError(f"not measured: {error}") from error


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
