"""`LLM`: the engine for a script or a notebook, in the caller's own thread.

with LLM("toy") as llm:
    for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32, seed=1)):
        print(out.outputs[0].text)
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from labkit.config import EngineConfig, SamplingParams
from labkit.engine.core import EngineCore
from labkit.engine.interrupts import interrupts_between_steps
from labkit.engine.metrics import EngineMetrics
from labkit.engine.outputs import OutputProcessor
from labkit.engine.prompts import Messages, Prompt, as_conversations, as_params, as_prompts, text_and_ids
from labkit.engine.request import EngineRequest, StepReport
from labkit.engine.trace import Trace
from labkit.errors import EngineClosedError, EngineStepError
from labkit.outputs import RequestOutput


class LLM:
    """A model and an engine around it.

    Args:
        model: a known name ("toy", "smollm2-135m"), a folder in Hugging Face layout, a .gguf file or a hub id.
        trace: where the engine's events go; None keeps the last ones in memory (`llm.engine.trace.events`).
        quiet: do not print the memory plan to stderr.
        **fields: of EngineConfig.

    Attributes:
        engine: the core, with `stats()` and `trace`.
        metrics: the same numbers as the server's /metrics, in a Prometheus registry of its own.
        tokenizer: text to token ids and back.

    Raises:
        ValueError: a field has a value that is not allowed.
        ModelError: the model cannot be found, read or held in memory.
    """

    def __init__(self, model: str, *, trace: Trace | None = None, quiet: bool = False, **fields: Any):
        known = [field.name for field in dataclasses.fields(EngineConfig)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ValueError(f"{unknown[0]} is not a field of EngineConfig; they are {', '.join(known)}")
        self.engine = EngineCore(str(model), EngineConfig(**fields), trace, quiet)
        self.tokenizer = self.engine.tokenizer
        self.metrics = EngineMetrics()
        self._processor = OutputProcessor(self.tokenizer)
        self._mailboxes: dict[str, RequestOutput | str | None] = {}  # newest output of each open request, or its error
        self._lock = threading.Lock()
        self._abandoned: list[str] = []  # requests whose reader went away while a step ran
        self._numbers = itertools.count()  # of requests; next() gives no two threads the same
        self._closed = False

    # ----------------------------------------------------------------------------------------- use

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; answers in the order of the prompts.

        Args:
            prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; one or a list of them.
            sampling_params: one for all, or one for each prompt.

        Raises:
            RequestError: (a ValueError) a request can never run; none of the call has been started then.
            EngineStepError: a step failed; the other requests of the call are cancelled.
        """
        requests = self._requests(prompts, sampling_params)
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: each a list of {"role": …, "content": …}."""
        prompts: list[Prompt] = []
        for talk in as_conversations(messages):
            text, ids = self.tokenizer.chat_prompt(talk, add_generation_prompt)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The same for one prompt, a RequestOutput after each step; its text only ever grows.

        Closing, dropping or leaving the iterator cancels the request. Streams may run side by side.
        """
        [request] = self._requests([prompt], sampling_params)
        return self._stream(*request)

    def close(self) -> None:
        """Give back the memory. A second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for request_id in self._mailboxes:
                    self._processor.discard(request_id)  # whoever reads on learns that it is closed
                self.engine.close()
                self._hand_out(self.engine.report())

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------- requests

    def _requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[EngineRequest, str | None]]:
        """Every prompt as a request that is known to fit, with its text; raises before any of them has begun."""
        self._check_open()
        prompt_list = as_prompts(prompts)
        out = []
        for prompt, one in zip(prompt_list, as_params(params, len(prompt_list)), strict=True):
            text, ids = text_and_ids(prompt, self.tokenizer)
            self.engine.limits.check(ids, one)
            out.append((EngineRequest(f"r{next(self._numbers)}", ids, one), text))
        return out

    # ----------------------------------------------------------------------------------------- running

    def _run(self, requests: list[tuple[EngineRequest, str | None]], use_tqdm: bool) -> list[RequestOutput]:
        open_ids = {request.request_id for request, _ in requests}
        outputs: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(requests), desc="Requests", unit="req", disable=not use_tqdm, dynamic_ncols=True)
        with interrupts_between_steps() as check:
            try:
                for request, text in requests:
                    self._add(request, text)
                while open_ids:
                    self._step()
                    # Not what this step moved: a step of another thread may have finished some of ours.
                    for request_id in [r for r in open_ids if self._is_done(r)]:
                        outputs[request_id] = self._take(request_id)
                        open_ids.discard(request_id)
                        bar.update()
                    check()
            finally:
                for request_id in open_ids:
                    self._cancel(request_id)
                bar.close()
                del bar  # now: what Ctrl-C raises in a destructor is lost
        return [outputs[request.request_id] for request, _ in requests]

    def _stream(self, request: EngineRequest, text: str | None) -> Iterator[RequestOutput]:
        request_id, finished = request.request_id, False
        try:
            self._add(request, text)
            while not finished:
                if self._mailboxes[request_id] is None:
                    with interrupts_between_steps() as check:
                        self._step()
                        check()
                    continue
                with self._lock:  # a step of another thread must not change it between the look and the copy
                    output = copy_output(self._take(request_id))
                    finished = output.finished
                    if not finished:
                        self._mailboxes[request_id] = None
                yield output
        finally:
            if not finished:
                self._cancel(request_id)

    def _is_done(self, request_id: str) -> bool:
        box = self._mailboxes[request_id]
        return isinstance(box, str) or (box is not None and box.finished)

    def _take(self, request_id: str) -> RequestOutput:
        box = self._mailboxes.pop(request_id)
        if isinstance(box, str):
            raise EngineStepError(box)
        assert box is not None
        return box

    def _add(self, request: EngineRequest, text: str | None) -> None:
        self._check_open()
        with self._lock:
            self._processor.add(request, text)
            self._mailboxes[request.request_id] = None
            self.engine.add_request(request)

    def _step(self) -> None:
        """One step of the engine; what it gave lies in the mailboxes then."""
        self._check_open()
        try:
            with self._lock:
                self._hand_out(self.engine.step())
                self._drop_abandoned()
        except BaseException:
            self._fail_all("a step was interrupted, and this request is lost; the engine goes on")
            raise

    def _hand_out(self, report: StepReport) -> None:
        processed = self._processor.process(report.deltas)
        for request_id, index, stop in processed.stops:
            self.engine.stop(request_id, index, stop)
        for request_id in processed.errors:
            self.engine.cancel(request_id)
        for output in processed.outputs:
            self._mailboxes[output.request_id] = processed.errors.get(output.request_id) or output
        self.metrics.observe(report, self.engine.stats())

    def _fail_all(self, error: str) -> None:
        """Some of what a step gave is lost, and nobody knows of which requests."""
        with self._lock:
            for request_id in list(self._mailboxes):
                if not self._is_done(request_id):
                    self._mailboxes[request_id] = error
                    self._processor.discard(request_id)
                    self.engine.cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        self._abandoned.append(request_id)
        # A dropped stream may be collected at any moment, even in the middle of a step of this very thread. Whoever
        # holds the lock sees to it then.
        if not self._lock.locked():
            with self._lock:
                self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        dropped = False
        while self._abandoned:
            request_id = self._abandoned[0]
            self._processor.discard(request_id)
            self._mailboxes.pop(request_id, None)
            self.engine.cancel(request_id)
            self._abandoned.remove(request_id)  # not before: it is done now
            dropped = True
        if dropped:
            self._hand_out(self.engine.report())  # nobody reads it; the metrics count it

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this LLM is closed; make a new one")


def copy_output(output: RequestOutput) -> RequestOutput:
    """A copy that later steps do not change."""
    completions = [
        dataclasses.replace(c, token_ids=list(c.token_ids), logprobs=None if c.logprobs is None else list(c.logprobs))
        for c in output.outputs
    ]
    return dataclasses.replace(output, outputs=completions, metrics=copy.copy(output.metrics))
