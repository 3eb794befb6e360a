"""The `labkit` command with a model that takes its time, for tests that interrupt it."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator

from fake_llm import FakeLLM

from labkit.cli import main
from labkit.config import SamplingParams
from labkit.outputs import RequestOutput


class SlowLLM(FakeLLM):
    pieces = tuple(f"w{i} " for i in range(10_000))

    def stream(self, prompt: object, params: SamplingParams) -> Iterator[RequestOutput]:
        for output in super().stream(prompt, params):
            time.sleep(0.01)
            yield output


sys.modules["labkit.llm"] = types.SimpleNamespace(LLM=SlowLLM)  # type: ignore[assignment]
main()
