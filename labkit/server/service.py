"""What the routes share: the model that is served, the engine, and the state of the server's life."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from labkit.config import EngineConfig, SamplingParams
from labkit.engine.limits import RequestLimits
from labkit.engine.request import EngineRequest
from labkit.errors import RequestError
from labkit.models.checkpoint import open_checkpoint
from labkit.models.tokenizer import Tokenizer
from labkit.server.config import ServerConfig
from labkit.server.engine import EngineClient
from labkit.server.errors import ApiError, bad_request, from_request_error, model_not_found, overloaded, timed_out
from labkit.server.generation import Generation
from labkit.server.messages import Launch
from labkit.server.protocol import ChatRequest, CompletionRequest, Message, TokenizeRequest, engine_params
from labkit.server.security import RateLimiter
from labkit.server.sensors import GpuMetrics, GpuSensor, TaskMetrics
from labkit.server.spans import Spans
from labkit.server.watch import Watch

MOST_TOKENIZED = 2  # texts of /tokenize at once: those who wait for an answer need threads, too
Result = TypeVar("Result")


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for the engine; `text` is None for a chat."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Loaded:
    """What is known once the model is loaded."""

    tokenizer: Tokenizer
    limits: RequestLimits
    longest_prompt: int | None = None  # bytes of UTF-8 that may still fit; None where that cannot be told

    @classmethod
    def measure(cls, tokenizer: Tokenizer, limits: RequestLimits) -> Loaded:
        """Where tokens are bytes, none is longer than the longest: so many bytes can never be few enough tokens."""
        if not tokenizer.is_byte_level:
            return cls(tokenizer, limits)
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        # Unicode normalisation before that may shorten a text, to a third at worst.
        return cls(tokenizer, limits, 4 * longest * limits.max_model_len)

    def check_size(self, text: str) -> None:
        """Raises RequestError for a text that is far too long, before seconds are spent to count its tokens."""
        if self.longest_prompt is not None and len(text) > self.longest_prompt:
            raise RequestError(
                f"the prompt has {len(text)} characters, far more than this model's length of "
                f"{self.limits.max_model_len} tokens can hold; shorten the prompt",
                "prompt",
                "context_length_exceeded",
            )


class Service:
    """One model, served.

    Attributes:
        draining: no new request is taken.
        closing: set when the server ends; event streams end with it.
        in_flight: requests that generate and are not answered to the end.
    """

    def __init__(self, model: str, config: ServerConfig):
        self.config = config
        self.name = config.served_model_name or model
        self.created = int(time.time())
        self.engine = EngineClient()
        self.engine.metrics.registry.register(TaskMetrics())
        self.spans = Spans(config.otlp_endpoint)
        self.rate_limiter = RateLimiter(config.rate_limit, config.rate_burst)
        self.tokenizing = asyncio.Semaphore(MOST_TOKENIZED)
        self.draining = False
        self.closing = asyncio.Event()
        self.in_flight = 0
        self._model = model
        self._loaded: Loaded | None = None
        self.gpu = GpuSensor(None)
        self.watch = Watch(self)

    # ----------------------------------------------------------------------------------- its life

    async def load(self, config: EngineConfig) -> None:
        """Start the engine with the model. Raises ModelError with the reason if that fails."""
        await self.engine.child.spawn()
        # The new process imports torch while this one finds the model, fetches it if need be, and reads its tokenizer.
        checkpoint = await in_daemon_thread(open_checkpoint, self._model)
        if self.config.served_model_name is None:
            self.name = checkpoint.name
        quiet = self.config.log_format == "json"  # the memory plan is for people
        launch = Launch(str(checkpoint.path), config, self.config.trace, quiet)
        ready = await self.engine.launch(launch, checkpoint.tokenizer)
        if ready.gpu_uuid is not None:
            self.gpu = await asyncio.to_thread(GpuSensor, ready.gpu_uuid)
            self.engine.metrics.registry.register(GpuMetrics(self.gpu))
        self._loaded = await asyncio.to_thread(Loaded.measure, checkpoint.tokenizer, ready.limits)

    @property
    def ready(self) -> bool:
        return self.engine.trouble is None and self._loaded is not None and not self.draining

    @property
    def state(self) -> str:
        """For the dashboard."""
        if self._loaded is None:
            return "loading"
        return "draining" if self.draining else "running"

    @property
    def loaded(self) -> Loaded:
        """Raises ApiError (503) while the model is being loaded."""
        if self._loaded is None:
            raise overloaded("the model is being loaded; try again soon", seconds=2)
        return self._loaded

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A request that the end of the server waits for."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def drain(self, seconds: float, now: asyncio.Event) -> None:
        """Take nothing new and let finish what runs; after `seconds`, or `now`, end the rest."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self.in_flight and time.monotonic() < deadline and not now.is_set():
            await asyncio.sleep(0.02)
        self.engine.fail_all(overloaded("the server is shutting down"))

    # ----------------------------------------------------------------------------------- a request's way in

    def admit(self, key: bytes) -> None:
        """Raises ApiError unless a new request may come in now."""
        self.rate_limiter.take(key)
        if self.draining:
            raise overloaded("the server is shutting down")
        _ = self.loaded
        self.engine.check()
        self._check_queue(1)

    def _check_queue(self, answers: int) -> None:
        if self.engine.waiting(answers) > self.config.max_queue:
            raise overloaded(
                f"too many requests are waiting already, the most is {self.config.max_queue} (--max-queue)"
            )

    def check_count(self, request: ChatRequest | CompletionRequest) -> None:
        """Raises ApiError (400) for more answers than this server could ever take at once."""
        prompts = 1 if isinstance(request, ChatRequest) else len(request.prompt)
        most = self.config.max_queue + self.engine.config.max_num_seqs
        if prompts * request.n > most:
            what = f"{prompts} prompts with n={request.n} are {prompts * request.n} answers"
            raise bad_request(f"{what}; this server takes at most {most} at once", "n" if prompts == 1 else "prompt")
        self._check_queue(prompts * request.n)

    def deadline(self, arrival: float) -> float | None:
        """When a request that came then must be answered; both are times of the event loop."""
        seconds = self.config.request_timeout
        return None if seconds is None else arrival + seconds

    def late(self) -> ApiError:
        return timed_out(self.config.request_timeout or 0)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise model_not_found(name, self.name)

    async def prepare(self, request: ChatRequest | CompletionRequest) -> list[Prompt]:
        """Token ids and parameters, checked. In a thread: a long text takes the tokenizer seconds."""
        return await asyncio.to_thread(self._prepare, request)

    def _prepare(self, request: ChatRequest | CompletionRequest) -> list[Prompt]:
        params = engine_params(request)
        try:
            if isinstance(request, ChatRequest):
                for message in request.messages:
                    self.loaded.check_size(message.content)
                ids = self._chat_ids(request.messages, request.add_generation_prompt)
                return [self._check(None, ids, params)]
            return [self._prompt(request, item, params) for item in request.prompt]
        except RequestError as error:
            raise from_request_error(error, request.name_of(error.param)) from None

    def _prompt(self, request: CompletionRequest, given: str | list[int], params: SamplingParams) -> Prompt:
        tokenizer, limits = self.loaded.tokenizer, self.loaded.limits
        text, ids = (given, self._encode_prompt(given)) if isinstance(given, str) else (None, given)
        if request.max_tokens is None:  # the default is no wish: it gives way where less fits
            most = max(1, limits.max_output_tokens(len(ids)), params.min_tokens)
            params = dataclasses.replace(params, max_tokens=min(CompletionRequest.DEFAULT_MAX_TOKENS, most))
        prompt = self._check(text, ids, params)
        if text is None and request.echo:
            text = tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)
        return dataclasses.replace(prompt, text=text)

    def _encode_prompt(self, text: str) -> list[int]:
        self.loaded.check_size(text)
        return self.encode(text)

    def _check(self, text: str | None, ids: list[int], params: SamplingParams) -> Prompt:
        limits = self.loaded.limits
        limits.check(ids, params)
        # More than the vocabulary is all of it, and the engine's integers have 32 bits.
        if params.top_k > limits.vocab_size:
            params = dataclasses.replace(params, top_k=0)
        return Prompt(text, ids, params)

    def submit(self, prompts: Sequence[Prompt]) -> Generation:
        """Hand the prompts to the engine. Raises ApiError when the queue has filled up meanwhile."""
        self._check_queue(sum(prompt.params.n for prompt in prompts))
        requests = [EngineRequest(self.engine.new_id(), prompt.token_ids, prompt.params) for prompt in prompts]
        return self.engine.submit(requests, [prompt.text for prompt in prompts])

    # ----------------------------------------------------------------------------------- text and tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return self.loaded.tokenizer.encode(text, add_special_tokens)
        except ValueError as error:
            raise RequestError(str(error), "prompt") from None

    def _chat_ids(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        turns = [message.for_template() for message in messages]
        return self.loaded.tokenizer.apply_chat_template(turns, add_generation_prompt)

    def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """The answer to /tokenize. Raises ApiError."""
        try:
            if request.messages is not None:
                tokens = self._chat_ids(request.messages, request.add_generation_prompt)
            else:
                tokens = self.encode(request.prompt or "", request.add_special_tokens)
        except RequestError as error:
            raise from_request_error(error, "prompt" if request.messages is None else "messages") from None
        limits, tokenizer = self.loaded.limits, self.loaded.tokenizer
        answer = {"count": len(tokens), "max_model_len": limits.max_model_len, "tokens": tokens}
        if request.return_token_strs:
            answer["token_strs"] = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        return answer

    def detokenize(self, tokens: list[int]) -> str:
        tokenizer = self.loaded.tokenizer
        for token in tokens:
            if not 0 <= token < tokenizer.vocab_size:
                raise bad_request(f"token {token} is not in the vocabulary, 0 to {tokenizer.vocab_size - 1}", "tokens")
        return tokenizer.decode(tokens, skip_special_tokens=False)


async def in_daemon_thread(function: Callable[[str], Result], argument: str) -> Result:
    """Like asyncio.to_thread, but the end of the program does not wait for it: a download may take minutes."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(argument))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
