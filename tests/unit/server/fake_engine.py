"""An engine without a model: every answer is the alphabet, from the number of prompt tokens on."""

from __future__ import annotations

import asyncio
import threading
import time

import tokenizers
import zmq

from labkit.config import EngineConfig
from labkit.engine.limits import RequestLimits
from labkit.engine.picture import Picture
from labkit.engine.request import Delta, EngineRequest, StepReport, TokenLogprobs
from labkit.engine.settings import Settings
from labkit.engine.stats import EngineStats
from labkit.engine.trace import Trace
from labkit.models.chat_template import ChatTemplate
from labkit.models.tokenizer import Tokenizer
from labkit.server.child import Child
from labkit.server.messages import Cancel, Launch, decode_to_engine
from labkit.server.process import EngineLoop

LETTERS = "abcdefghijklmnopqrstuvwxyz"
EOS = 256
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, and an end token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    return Tokenizer(backend, ChatTemplate(TEMPLATE, {}), eos_token_id=EOS)


class FakeCore:
    """The part of EngineCore that the server uses.

    Attributes:
        gate: steps run while it is set.
        error: the next step fails with this.
        seconds: what a step takes.
        script: token ids that answers are made of, instead of the alphabet.
    """

    def __init__(self, config: EngineConfig):
        self.config = config.replace(max_model_len=64, num_kv_blocks=64)
        self.limits = RequestLimits(max_model_len=64, vocab_size=257, kv_tokens=64 * 16)
        self.launched = self.config
        self.trace = Trace()
        self.gpu_uuid: str | None = None
        self.changes: list[Settings] = []
        self.tokenizer = byte_tokenizer()
        self.gate = threading.Event()
        self.gate.set()
        self.error: str | None = None
        self.seconds = 0.001
        self.script: list[int] | None = None
        self.requests: list[EngineRequest] = []  # all that ever came
        self.cancelled: list[str] = []
        self.stops: list[tuple[str, int, str]] = []
        self._answers: dict[tuple[str, int], tuple[EngineRequest, int]] = {}  # not ended → tokens so far
        self._ended: list[Delta] = []
        self._tokens_out = 0

    def add_request(self, request: EngineRequest) -> None:
        self.limits.check(request.prompt_token_ids, request.params)
        self.requests.append(request)
        for index in range(request.params.n):
            self._answers[request.request_id, index] = (request, 0)

    def cancel(self, request_id: str) -> None:
        for key in [key for key in self._answers if key[0] == request_id]:
            del self._answers[key]
            self.cancelled.append(request_id)
            self._ended.append(Delta(*key, finish_reason="abort"))

    def stop(self, request_id: str, index: int, stop: str) -> None:
        self.stops.append((request_id, index, stop))
        self._answers.pop((request_id, index), None)

    def has_work(self) -> bool:
        return bool(self._ended) or bool(self._running() and self.gate.is_set())

    def _running(self) -> list[tuple[str, int]]:
        return list(self._answers)[: self.config.max_num_seqs]

    def step(self) -> StepReport:
        deltas, self._ended = self._ended, []
        error, self.error = self.error, None
        for key in self._running():
            request, made = self._answers[key]
            if error is not None:
                deltas.append(Delta(*key, finish_reason="abort", error=error))
                del self._answers[key]
                continue
            deltas.append(self._delta(key, request, made))
            self._answers[key] = (request, made + 1)
            if deltas[-1].finish_reason is not None:
                del self._answers[key]
        time.sleep(self.seconds)
        return StepReport(deltas, len(deltas), 0.001)

    def _delta(self, key: tuple[str, int], request: EngineRequest, made: int) -> Delta:
        params, prompt = request.params, request.prompt_token_ids
        delta = Delta(*key, arrival_time=0.0, first_scheduled_time=0.0, first_token_time=0.0)
        if made == 0 and key[1] == 0 and params.prompt_logprobs is not None:
            delta.prompt_logprobs = [scores(token, params.prompt_logprobs) for token in prompt[1:]]
        if params.max_tokens != 0:
            delta.token_ids = [self.token(len(prompt) + made if self.script is None else made)]
            if params.logprobs is not None:
                delta.logprobs = [scores(delta.token_ids[0], params.logprobs)]
            self._tokens_out += 1
        most = self.limits.max_output_tokens(len(prompt)) if params.max_tokens is None else params.max_tokens
        if made + 1 >= most:
            delta.finish_reason = "length"
            delta.finished_time = 1.0
        return delta

    def token(self, number: int) -> int:
        script = self.script or self.tokenizer.encode(LETTERS)
        return script[number % len(script)]

    def stats(self) -> EngineStats:
        running = len(self._running()) if self.gate.is_set() else min(len(self._answers), self.config.max_num_seqs)
        return EngineStats(running=running, waiting=len(self._answers) - running, tokens_out=self._tokens_out)

    def change(self, settings: Settings) -> None:
        settings.check(self.launched)
        self.changes.append(settings)
        self.config = self.config.replace(**settings.changes(self.config))

    def picture(self) -> Picture:
        return Picture(self.trace.now(), [], 1, bytes(64), bytes(64), [], [])

    def close(self) -> None:
        pass


def scores(token: int, top: int) -> TokenLogprobs:
    """The token is the likeliest, those after it follow."""
    ids = [(token + i) % 256 for i in range(top)]
    return TokenLogprobs(token, -0.5, 1, ids, [-0.5 - i for i in range(top)])


class FakeProcess:
    """Runs a FakeCore in a thread where the server would start a process."""

    def __init__(self) -> None:
        self.core: FakeCore
        self.child: Child
        self.spawned = 0
        self._thread: threading.Thread | None = None

    async def spawn(self, child: Child) -> None:
        self.child = child
        self.spawned += 1
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(child.address,), daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """An idle engine waits for a message; after the gate has been opened it needs one."""
        self._loop.call_soon_threadsafe(self.child.send, Cancel("nobody"))

    def die(self) -> None:
        """As when the process has ended."""
        asyncio.run_coroutine_threadsafe(self.child.died("the fake engine has died"), self._loop)

    def _run(self, address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.connect(address)
            launch = decode_to_engine(socket.recv())
            assert isinstance(launch, Launch)
            self.core = FakeCore(launch.config)
            EngineLoop(self.core, socket, received=1).run()
