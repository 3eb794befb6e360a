"""One request to an OpenAI-style server, and when each piece of its answer came.

With aiohttp: its parser is C, and a chunk costs it a third of the time that httpx takes. At 15,000 chunks a second
that is one core instead of three, on the machine of the server that is measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from labkit.bench.load.record import Timing
from labkit.bench.load.workloads import Ask

# uvicorn closes a connection that was idle for 5 s. One that is used just then would be an error of nobody's.
KEEP_ALIVE_SECONDS = 2
LONGEST_LINE = 1 << 22  # bytes; an event is one line


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Delta(msgspec.Struct):
    content: str | None = None


class Listed(msgspec.Struct):
    """Logprobs: completions have `tokens`, chat has `content`, with an entry a token."""

    tokens: list[str] | None = None
    content: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    logprobs: Listed | None = None
    finish_reason: str | None = None


class Event(msgspec.Struct):
    """The fields of a chunk that matter here."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_event = msgspec.json.Decoder(Event).decode


class AnswerError(Exception):
    """No whole answer.

    Args:
        kind: short, and the same for all of a kind: errors are counted by it.
        detail: what the server says.
    """

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind)
        self.detail = detail


@dataclass(frozen=True)
class Target:
    """A server, and how it is asked.

    Attributes:
        url: without a path.
        api: "completions", with token ids, or "chat", with text.
        ignore_eos: answers run to their full length, and a shorter one is an error. OpenAI's own servers do not
            know that field.
        list_tokens: ask for logprobs, so that the tokens of each chunk can be counted. That costs the server.
        timeout_s: for a whole answer.
    """

    url: str
    model: str
    key: str = "dev-key"
    api: str = "completions"
    ignore_eos: bool = True
    list_tokens: bool = False
    timeout_s: float = 600.0

    def path(self) -> str:
        return f"{self.url}/v1/{'chat/completions' if self.api == 'chat' else 'completions'}"

    def body(self, ask: Ask, temperature: float) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.api == "chat":
            system, user = ask.text
            first = [{"role": "system", "content": system}] if system else []
            body["messages"] = [*first, {"role": "user", "content": user}]
        else:
            body["prompt"] = ask.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.list_tokens:
            body["logprobs"] = True if self.api == "chat" else 0
        return body


@dataclass
class Received:
    """What came of an answer so far.

    Attributes:
        stamps: of each chunk with text, time.monotonic().
        listed: tokens counted one by one; None while none were listed.
        detail: of an error, as the server tells it.
    """

    stamps: list[float] = field(default_factory=list)
    listed: int | None = None
    usage: Usage | None = None
    detail: str = ""

    def take(self, event: Event, now: float) -> None:
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            if choice.text or (choice.delta is not None and choice.delta.content):
                self.stamps.append(now)
            if choice.logprobs is not None:
                entries = choice.logprobs.tokens or choice.logprobs.content or ()
                self.listed = (self.listed or 0) + len(entries)

    def count(self) -> tuple[int, str]:
        """Output tokens, and what they were counted by."""
        if self.listed is not None:
            return self.listed, "tokens"
        if self.usage is not None:
            return self.usage.completion_tokens, "usage"
        return len(self.stamps), "chunks"


def open_session(target: Target) -> aiohttp.ClientSession:
    """As many connections as there are requests, kept open between them."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        headers={"Authorization": f"Bearer {target.key}"},
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        read_bufsize=LONGEST_LINE,
        json_serialize=lambda value: msgspec.json.encode(value).decode(),
    )


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """The events of a stream, to its end.

    Raises:
        AnswerError: it is no stream, an event is an error, or the stream ends without `[DONE]`.
    """
    if response.status != 200:
        raise AnswerError(f"http {response.status}", await response.text(errors="replace"))
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = decode_event(data)
        except msgspec.DecodeError:
            raise AnswerError("unreadable event") from None
        if event.error is not None:
            raise AnswerError("error in the stream", str(event.error))
        yield event
    raise AnswerError("cut off")


async def fetch(
    session: aiohttp.ClientSession, target: Target, ask: Ask, temperature: float
) -> tuple[Timing, Received]:
    """Ask, read to the end, and say when what came. Never raises for what a server or the network does.

    Times are time.monotonic(), the same clock in all processes of a machine.
    """
    received, error = Received(), None
    sent = time.monotonic()
    try:
        async with session.post(target.path(), json=target.body(ask, temperature)) as response:
            async for event in read_events(response):
                received.take(event, time.monotonic())
        if target.ignore_eos and received.count()[1] != "chunks" and received.count()[0] != ask.max_tokens:
            raise AnswerError("not as many tokens as asked for")
    except AnswerError as failure:
        error, received.detail = str(failure), failure.detail
    except TimeoutError:
        error = "timeout"
    except (aiohttp.ClientError, OSError) as failure:
        error = f"connection: {type(failure).__name__}"
    return _timing(ask, received, sent, time.monotonic(), error), received


def _timing(ask: Ask, received: Received, sent: float, end: float, error: str | None) -> Timing:
    stamps = received.stamps
    tokens, counted_by = received.count()
    return Timing(
        sent_s=sent,
        due_s=ask.due_s,
        first_s=stamps[0] if stamps else None,
        last_s=stamps[-1] if stamps else None,
        end_s=end,
        longest_gap_s=max((b - a for a, b in itertools.pairwise(stamps)), default=None),
        prompt_tokens=received.usage.prompt_tokens if received.usage else len(ask.prompt),
        output_tokens=tokens,
        counted_by=counted_by,
        chunks=len(stamps),
        error=error,
    )
