"""One call of /v1/chat/completions or /v1/completions, from the parsed request to the answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from starlette.responses import Response

from labkit.outputs import CompletionOutput, RequestOutput
from labkit.server.answers import ChatApi, ChatLogprobs, Progress, TextApi, TextLogprobs, usage
from labkit.server.engine import Generation
from labkit.server.errors import timed_out
from labkit.server.protocol import ChatRequest, CompletionRequest
from labkit.server.service import Prompt, Service
from labkit.server.stream import DONE, EventStream, event, json_response


class Completion:
    """The answer to one call, whole or as a stream.

    Args:
        arrival: time of the event loop when the request came; the timeout counts from there.
    """

    def __init__(self, service: Service, request: ChatRequest | CompletionRequest, arrival: float):
        self._service = service
        self._request = request
        self._api = ChatApi() if isinstance(request, ChatRequest) else TextApi()
        self._id = f"{self._api.id_prefix}{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._seconds = service.config.request_timeout
        self._deadline = None if self._seconds is None else arrival + self._seconds

    async def respond(self, until_answered: contextlib.ExitStack) -> Response:
        """The whole answer; of a stream the beginning, so that what fails before it is an answer of its own.

        Args:
            until_answered: gets what must be done once the answer is out, or nobody waits for it any more.

        Raises:
            ApiError
        """
        try:
            async with asyncio.timeout_at(self._deadline):
                prompts = await self._service.prepare(self._request)
                generation = self._service.submit(prompts)
                until_answered.callback(generation.close)
                choices = list(self._choices(generation, prompts))
                if not self._request.stream:
                    while not generation.finished:
                        await generation.news()
                    return json_response(self._whole(generation, choices))
                await generation.news()
        except TimeoutError:
            raise timed_out(self._seconds or 0) from None
        late = timed_out(self._seconds or 0)
        return EventStream(self._events(generation, choices), self._deadline, late)

    def _choices(self, generation: Generation, prompts: Sequence[Prompt]) -> Iterator[Choice]:
        """In the order of their index, prompt × n + choice."""
        index = 0
        for prompt, output in zip(prompts, generation.outputs, strict=True):
            for completion in output.outputs:
                yield Choice(index, output, completion, self._progress(prompt))
                index += 1

    def _progress(self, prompt: Prompt) -> Progress:
        request, tokenizer = self._request, self._service.loaded.tokenizer
        if isinstance(request, ChatRequest):
            return Progress(ChatLogprobs(tokenizer, request.top_logprobs or 0) if request.logprobs else None)
        logprobs = None
        if request.logprobs is not None:
            logprobs = TextLogprobs(tokenizer, request.logprobs, request.skip_special_tokens)
        return Progress(logprobs, echo=prompt.text if request.echo else None)

    def _whole(self, generation: Generation, choices: Sequence[Choice]) -> dict[str, Any]:
        shapes = []
        for choice in choices:
            piece = choice.progress.take(choice.output, choice.completion)
            assert piece is not None  # it has its finish_reason
            shapes.append(self._api.choice(choice.index, piece))
        return self._frame(self._api.whole, shapes) | {"usage": usage(generation.outputs)}

    async def _events(self, generation: Generation, choices: Sequence[Choice]) -> AsyncIterator[bytes]:
        data = [self._chunk(first) for choice in choices if (first := self._api.first(choice.index)) is not None]
        while True:
            finished = generation.finished  # asked before looking: what comes during the yield is for the next round
            for choice in choices:
                data += self._news(choice)
            if data:
                yield b"".join(data)
            if finished:
                break
            await generation.news()
            data = []
        if self._request.wants_usage:
            yield event(self._frame(self._api.chunk, []) | {"usage": usage(generation.outputs)})
        yield DONE

    def _news(self, choice: Choice) -> Iterator[bytes]:
        piece = choice.progress.take(choice.output, choice.completion)
        if piece is None:
            return
        if piece.text or piece.logprobs:
            yield self._chunk(self._api.content(choice.index, piece))
        if piece.finish_reason is not None:
            yield self._chunk(self._api.last(choice.index, piece))

    def _chunk(self, shape: dict[str, Any]) -> bytes:
        return event(self._frame(self._api.chunk, [shape]))

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.name,
            "choices": choices,
        }


class Choice:
    """One of the answers of a call: where the engine writes it, and what of it was given out."""

    def __init__(self, index: int, output: RequestOutput, completion: CompletionOutput, progress: Progress):
        self.index = index
        self.output = output
        self.completion = completion
        self.progress = progress
