"""What is run: prompts of random token ids and how many tokens each is to give back.

A workload is a function of its name and the vocabulary alone, so two engines, or two days, get the same one.

    name        requests   tokens in     tokens out    temperature   what it shows
    decode1            1          48            128              0   one stream: weights read once a token
    decode8            8          48            128              0   eight streams share that one reading
    prefill512         1         512              1              0   matrix products, not memory
    nano256          256    100–1024       100–1024            0.6   a crowd that comes and goes (nano-vllm's own)
    b1 b8 b64     1 8 64         128            512            0.6   steady decoding on a GPU
    prefill32x2048    32        2048              1              0   steps full of prompts on a GPU
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from labkit.errors import LabkitError

LARGEST_ID = 10_000  # nano-vllm draws from 0 to 10,000 whatever the vocabulary; a smaller vocabulary cuts that
CPU_WORKLOADS = ("decode1", "decode8", "prefill512")
CUDA_WORKLOADS = ("nano256", "b1", "b8", "b64", "prefill32x2048")
WORKLOADS = CPU_WORKLOADS + CUDA_WORKLOADS


@dataclass(frozen=True)
class Workload:
    """Requests that are sent all at once, each run to its full length (the end-of-sequence token is ignored).

    Attributes:
        counts: which tokens its tok/s counts, "output" or "prompt".
        prompts: token ids, one list a request.
        max_tokens: how many tokens each request gives back.
    """

    name: str
    seed: int
    counts: str
    temperature: float
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(prompt) + out for prompt, out in zip(self.prompts, self.max_tokens))

    @property
    def total(self) -> int:
        """Tokens of all requests, prompt and output together: what the KV cache holds if all run at once."""
        return sum(map(len, self.prompts)) + sum(self.max_tokens)

    def shortened(self, max_tokens: int) -> Workload:
        """The same prompts with at most that many tokens out: for warming up."""
        return replace(self, max_tokens=[min(max_tokens, out) for out in self.max_tokens])


def make_workload(name: str, vocab_size: int) -> Workload:
    """The workload of that name for a model that knows ids 0 to vocab_size - 1.

    Raises:
        LabkitError: there is no workload of that name.
    """
    largest = min(LARGEST_ID, vocab_size - 1)
    if name == "nano256":
        return _crowd(largest)
    if name in ("b1", "b8", "b64"):
        return _batch(name, int(name[1:]), 128, 512, largest, temperature=0.6)
    if name in ("decode1", "decode8"):
        # All prompts have one length, so a peer that pads its batch has nothing to pad.
        return _batch(name, int(name[len("decode") :]), 48, 128, largest, temperature=0.0)
    if name in ("prefill512", "prefill32x2048"):
        requests, tokens_in = {"prefill512": (1, 512), "prefill32x2048": (32, 2048)}[name]
        return replace(_batch(name, requests, tokens_in, 1, largest, temperature=0.0), counts="prompt")
    raise LabkitError(f"there is no workload {name!r}; known ones: {', '.join(WORKLOADS)}")


def _crowd(largest: int, seed: int = 0) -> Workload:
    """nano-vllm's own benchmark. Draw by draw as it does it: the order of the draws is the workload."""
    r = Random(seed)
    prompts = [[r.randint(0, largest) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    return Workload("nano256", seed, "output", 0.6, prompts, [r.randint(100, 1024) for _ in range(256)])


def _batch(
    name: str, requests: int, tokens_in: int, tokens_out: int, largest: int, temperature: float, seed: int = 1
) -> Workload:
    r = Random(seed)
    prompts = [[r.randint(0, largest) for _ in range(tokens_in)] for _ in range(requests)]
    return Workload(name, seed, "output", temperature, prompts, [tokens_out] * requests)


@dataclass(frozen=True)
class Answer:
    """What an engine gave back for a workload, as the caller received it; one entry a request.

    Attributes:
        seconds: from handing over the requests to holding the last token.
        token_ids: the tokens received.
        first_token_s, finished_s: since the run began; None where the engine does not tell.
    """

    seconds: float
    token_ids: list[list[int]]
    first_token_s: list[float | None]
    finished_s: list[float | None]
