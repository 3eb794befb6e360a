"""One call of /v1/chat/completions or /v1/completions, from the parsed request to the answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.responses import Response

from labkit.outputs import CompletionOutput, RequestOutput
from labkit.server.answers import ChatApi, ChatLogprobs, Progress, TextApi, TextLogprobs, usage
from labkit.server.generation import Generation
from labkit.server.protocol import ChatRequest, CompletionRequest
from labkit.server.service import Prompt, Service
from labkit.server.stream import DONE, Outlet, Stream, encode, event, json_response


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
        self._deadline = service.deadline(arrival)

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
                    await generation.ended()
                    self._service.spans.answers(self._service.name, generation.outputs)
                    if self._request.logprobs is None or self._request.logprobs is False:
                        return json_response(self._whole(generation, choices))
                    # Of a long prompt and many answers, these are megabytes, and others are waiting for their tokens.
                    return await asyncio.to_thread(lambda: json_response(self._whole(generation, choices)))
                await generation.begun()
        except TimeoutError:
            raise self._service.late() from None
        return Stream(lambda outlet: self._stream(generation, choices, outlet), self._deadline, self._service.late())

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

    async def _stream(self, generation: Generation, choices: Sequence[Choice], outlet: Outlet) -> None:
        """One write for all that a step gave, whatever the number of choices."""
        frame = self._frame(self._api.chunk, [])
        # Of a chunk all but the choice is always the same, and there is one for every token: it is encoded once.
        head = b"data: " + encode(frame).removesuffix(b"]}")
        opening = [self._api.first(choice.index) for choice in choices]
        shapes = [shape for shape in opening if shape is not None]

        async def write() -> None:
            finished = generation.finished
            for choice in choices:
                shapes.extend(self._news(choice))
            so_far = b',"usage":' + encode(usage(generation.outputs)) if self._request.wants_usage_in_chunks else b""
            data = [head + encode(shape) + b"]" + so_far + b"}\n\n" for shape in shapes]
            shapes.clear()
            if finished and self._request.wants_usage:
                data.append(event(frame | {"usage": usage(generation.outputs)}))
            if finished:
                data.append(DONE)
            if data:
                await outlet.write(b"".join(data), last=finished)

        await generation.follow(write)
        self._service.spans.answers(self._service.name, generation.outputs)

    def _news(self, choice: Choice) -> list[dict[str, Any]]:
        piece = choice.progress.take(choice.output, choice.completion)
        if piece is None:
            return []
        shapes = [self._api.content(choice.index, piece)] if piece.text or piece.logprobs else []
        if piece.finish_reason is not None:
            shapes.append(self._api.last(choice.index, piece))
        return shapes

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
