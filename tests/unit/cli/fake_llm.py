"""A stand-in for the LLM, so that the command line is tested without a model (and without importing torch)."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import ClassVar

from labkit.config import EngineConfig, SamplingParams
from labkit.errors import ModelError
from labkit.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

CONTEXT = 400


class FakeTokenizer:
    """One token a character of the conversation."""

    def apply_chat_template(self, messages: list[dict]) -> list[int]:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return [ord(c) for c in text]


class FakeLLM:
    """Writes `pieces`, one a step, and remembers what it was asked."""

    made: ClassVar[list[FakeLLM]] = []
    pieces = ("One", " two", " é")
    broken: Exception | None = None

    def __init__(self, model: str, *, quiet: bool = False, **fields: object):
        if model.startswith("/no"):
            raise ModelError(f"{model} is not there")
        self.model, self.quiet, self.config = model, quiet, EngineConfig(**fields)  # type: ignore[arg-type]
        if (self.config.max_model_len or 0) > CONTEXT:
            raise ValueError(f"max_model_len is {self.config.max_model_len}; this model has {CONTEXT}")
        self.prompts: list = []
        self.params: list[SamplingParams] = []
        self.tokenizer = FakeTokenizer()
        limits = types.SimpleNamespace(
            max_model_len=CONTEXT, kv_tokens=CONTEXT, max_output_tokens=lambda prompt: CONTEXT - prompt
        )
        self.engine = types.SimpleNamespace(limits=limits)
        self.closed = False
        FakeLLM.made.append(self)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def stream(self, prompt: object, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts.append(prompt)
        self.params.append(params)
        if self.broken is not None:
            raise self.broken
        for count in range(1, len(self.pieces) + 1):
            yield self._output(prompt, count)

    def generate(self, prompts: list[str], params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        self.params.append(params)
        output = self._output(prompts[0], len(self.pieces))
        output.outputs = [self._answer(index, len(self.pieces)) for index in range(params.n)]
        return [output]

    def _answer(self, index: int, count: int) -> CompletionOutput:
        done = count == len(self.pieces)
        logprob = {7: Logprob(float("-inf"), 1, "One")}
        text = "".join(self.pieces[:count])
        return CompletionOutput(index, text, list(range(count)), -1.5, [logprob], "stop" if done else None)

    def _output(self, prompt: object, count: int) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        done = count == len(self.pieces)
        return RequestOutput("r0", text, [1, 2], [self._answer(0, count)], done, 0, RequestMetrics(0.0))
