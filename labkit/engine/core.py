"""The engine: requests in, steps, tokens out. One thread, nothing hidden.

add_request ─→ waiting ─→ scheduler ─→ runner ─→ scheduler ─→ deltas
                          who, how     forward    books the
                          many tokens  and draw   results

On a GPU the host is one step behind: it launches the next step before it reads what the last one drew, so that the GPU
never waits for Python. On a CPU a step is over when it is launched.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from labkit.config import EngineConfig, ModelConfig
from labkit.engine import runner as runners
from labkit.engine import scheduler as schedulers
from labkit.engine.launched import Launched
from labkit.engine.limits import RequestLimits
from labkit.engine.picture import Picture, take_picture
from labkit.engine.request import ChunkResult, Delta, EngineRequest, Sequence, Step, StepReport, TokenLogprobs
from labkit.engine.sequences import make_delta, make_sequences, request_seed
from labkit.engine.settings import Settings
from labkit.engine.stats import EngineStats
from labkit.engine.trace import Trace
from labkit.errors import EngineClosedError
from labkit.kernels import backend
from labkit.models.checkpoint import open_checkpoint
from labkit.models.decoder import Decoder
from labkit.models.memory import plan_memory
from labkit.models.tokenizer import Tokenizer

BATCHED_TOKENS = {"cuda": 8192, "cpu": 512}
MOST_CHANGES = 32  # of the settings, that are remembered


class EngineCore:
    """The loop and everything it owns. `LLM` drives it in the caller's thread, `labkit serve` in its own process.

    Args:
        model: any MODEL of the command line: a known name, a folder, a .gguf file or a hub id.
        config: as the user gave it; `self.launched` is the same with every "auto" and None decided, `self.config` that
            with what has been changed since.
        trace: where events go; None keeps the last ones in memory.
        quiet: do not print the memory plan to stderr.

    Raises:
        ModelError: the model cannot be found, read or held in memory.
    """

    def __init__(self, model: str, config: EngineConfig, trace: Trace | None = None, quiet: bool = False):
        device = backend.resolve_device(config.device)
        dtype = backend.resolve_dtype(config.dtype, device)
        config = config.replace(
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            max_num_batched_tokens=config.max_num_batched_tokens or BATCHED_TOKENS[device.type],
        )
        checkpoint = open_checkpoint(model)
        plan = plan_memory(checkpoint.config, config, device, dtype)
        if not quiet:
            print(plan, file=sys.stderr)
        self.config = config.replace(max_model_len=plan.max_model_len, num_kv_blocks=plan.num_kv_blocks)
        self.model_name = checkpoint.name
        self.model_config: ModelConfig = checkpoint.config
        self.tokenizer: Tokenizer = checkpoint.tokenizer
        self.trace = trace or Trace()
        self.limits = RequestLimits(
            max_model_len=plan.max_model_len,
            vocab_size=checkpoint.config.vocab_size,
            kv_tokens=plan.num_kv_blocks * config.block_size,
        )
        weights = checkpoint.load(dtype, device)
        decoder = Decoder(checkpoint.config, weights, plan.max_model_len, config.kernels, config.batch_invariant)
        self.runner = runners.Runner(
            decoder,
            self.config,
            num_blocks=plan.num_kv_blocks,
            max_model_len=plan.max_model_len,
            device=device,
            dtype=dtype,
        )
        self.scheduler = schedulers.Scheduler(self.config, num_blocks=plan.num_kv_blocks, trace=self.trace)
        self.launched = self.config  # what memory was planned for
        self.changes: collections.deque[dict[str, Any]] = collections.deque(maxlen=MOST_CHANGES)
        self._requests: dict[str, list[Sequence]] = {}  # those with an unfinished answer
        self._deltas: list[Delta] = []  # not reported yet
        self._in_flight: collections.deque[tuple[Step, Launched]] = collections.deque()
        self.steps_behind = 1 if device.type == "cuda" else 0  # how many may be in flight when a step is reported
        self._last_booked = 0.0
        self._num_requests = 0
        self._steps = 0
        self._tokens_in = 0
        self._tokens_out = 0
        self._step_seconds = 0.0
        self._runner_seconds = 0.0
        self._closed = False
        self._kv_bytes = self.runner.kv_bytes
        if device.type == "cuda":
            # What was made so far stays, and to look through it again would take Python longer than a step takes.
            gc.collect()
            gc.freeze()

    # ----------------------------------------------------------------------------------------- requests

    def add_request(self, request: EngineRequest) -> None:
        """Put a request into the waiting queue.

        Raises:
            RequestError: it can never run; nothing else is disturbed.
            EngineClosedError: after close().
        """
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new LLM")
        self.limits.check(request.prompt_token_ids, request.params)
        number = self._num_requests
        seed = request.params.seed if request.params.seed is not None else request_seed(self.config.seed, number)
        most = self.limits.max_output_tokens(len(request.prompt_token_ids))
        sequences = make_sequences(request, number, seed, most, self.model_config.eos_token_ids, self.trace.now())
        with self._whole_books():
            self._requests[request.request_id] = sequences
            for seq in sequences:
                self.trace.emit("submit", req=seq.id, prompt=seq.num_prompt_tokens)
                self.scheduler.add(seq)
            self._num_requests += 1

    def cancel(self, request_id: str) -> None:
        """End every unfinished answer of a request with "abort". Unknown ids are fine: it may just have ended."""
        with self._whole_books():
            for seq in self._requests.get(request_id, ()):
                self._abort(seq)
            self._settle()

    def stop(self, request_id: str, index: int, stop_reason: str) -> None:
        """A stop string was found in an answer's text: it ends here."""
        with self._whole_books():
            for seq in self._requests.get(request_id, ()):
                if seq.index == index and seq.finish_reason is None:
                    self.scheduler.finish(seq, "stop", stop_reason)
                    self._forget(seq)
            self._settle()

    def _abort(self, seq: Sequence, error: str | None = None) -> None:
        if seq.finish_reason is None:
            self.scheduler.finish(seq, "abort")
            self._deltas.append(make_delta(seq, error=error))
            self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        sequences = self._requests.get(seq.request_id)
        if sequences is not None and all(s.finish_reason is not None for s in sequences):
            del self._requests[seq.request_id]

    def change(self, settings: Settings) -> None:
        """Go on with other settings from the next step on. Each one that changes is an event of the trace.

        Raises:
            RequestError: one of them cannot be; nothing has changed then.
        """
        settings.check(self.launched)
        changes = settings.changes(self.config)
        with self._whole_books():
            self.trace.step = self._steps
            for name, value in changes.items():
                self.trace.emit("setting", name=name, value=value, was=getattr(self.config, name))
                self.changes.append(self.trace.events[-1])
            self.config = self.config.replace(**changes)
            self.scheduler.reconfigure(self.config)

    # ----------------------------------------------------------------------------------------- steps

    def has_work(self) -> bool:
        """True while a step would do or report something."""
        return bool(self._requests or self._deltas or self._in_flight)

    def step(self) -> StepReport:
        """Launch a step and report what one gave: the same on a CPU, the one before it on a GPU.

        An exception in a step ends the requests of that step, with `Delta.error`; the engine goes on.
        """
        begin = time.perf_counter()
        with self._whole_books():
            self.trace.step = self._steps
            step = self.scheduler.schedule()
            if step is not None:
                self._launch(step)
            elif not self._in_flight and self.scheduler.waiting and not self.scheduler.running:
                # Cannot happen: every request fits alone. If it does, an error is better than a hang.
                for seq in list(self.scheduler.waiting):
                    self._abort(seq, error="the scheduler cannot place this request")
            num_tokens = 0
            if len(self._in_flight) > (self.steps_behind if step is not None else 0):
                num_tokens = self._in_flight[0][0].num_tokens
                self._book_next()
            self._settle()
            seconds = time.perf_counter() - begin
            self._step_seconds += seconds
            return self.report(num_tokens, seconds)

    def report(self, num_tokens: int = 0, seconds: float = 0.0) -> StepReport:
        """What has come since the last report. Between two steps: of requests that were cancelled."""
        deltas, self._deltas = self._deltas, []
        self._tokens_out += sum(len(delta.token_ids) for delta in deltas)
        return StepReport(deltas, num_tokens, seconds)

    def _settle(self) -> None:
        """With nobody left, wait for what still runs on the device: its blocks are free then."""
        while self._in_flight and not self._requests:
            self._book_next()

    @contextlib.contextmanager
    def _whole_books(self) -> Iterator[None]:
        """Around whatever changes who holds what.

        The handler of a signal may raise between any two lines. Then half a change is in the books, and nobody knows
        which half; so they are made anew, and all requests end with an error.
        """
        try:
            yield
        except BaseException:
            self._start_anew()
            raise

    def _start_anew(self) -> None:
        """The device may still write for steps that are forgotten here; what is launched later runs after them."""
        sequences = [seq for group in self._requests.values() for seq in group]
        holders = dict.fromkeys(sequences + [chunk.seq for step, _ in self._in_flight for chunk in step.chunks])
        self._in_flight.clear()
        self.scheduler.start_anew()
        for seq in holders:
            if seq.block_table:
                self.trace.emit("free", req=seq.id, blocks=seq.block_table)
        for seq in sequences:
            if seq.finish_reason is None:
                seq.finish_reason = "abort"
                self.trace.emit("cancel", req=seq.id)
                self._deltas.append(make_delta(seq, error="the step was interrupted"))
        self._requests.clear()

    @contextlib.contextmanager
    def _guarded(self, step: Step) -> Iterator[None]:
        """Around what the runner does: if it fails, so do the requests of the step, and no others."""
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.scheduler.abandon(step)
            for chunk in step.chunks:
                for seq in self._requests.get(chunk.seq.request_id, ()):
                    self._abort(seq, f"the step failed: {type(error).__name__}: {error}")
        finally:
            self._runner_seconds += time.perf_counter() - begin

    def _launch(self, step: Step) -> None:
        self._steps += 1
        launched = None
        with self._guarded(step):
            launched = self.runner.launch(step)
        if launched is not None:
            self._in_flight.append((step, launched))

    def _book_next(self) -> None:
        """Wait for the oldest step in flight and book it; nothing comes of it if it failed."""
        step, launched = self._in_flight[0]
        results = None
        with self._guarded(step):
            results = launched.results()
        if results is not None:
            self.trace.step = step.number
            kinds = self._kinds(step)
            self._book(step, results)
            now = self.trace.now()
            self._emit_step(kinds, now - max(self._last_booked, step.scheduled_time))
            self._last_booked = now
        self._in_flight.popleft()  # not before: until then it says who holds blocks for the step

    def _book(self, step: Step, results: list[ChunkResult]) -> None:
        pairs = list(zip(step.chunks, results, strict=True))
        going_on = [
            (chunk, result, chunk.seq.num_output_tokens) for chunk, result in pairs if not chunk.seq.finish_reason
        ]
        self._tokens_in += sum(s.num_prompt_tokens for s in step.admitted if s.num_preemptions == 0)
        self.scheduler.book(step, [result.token for result in results])
        for chunk, result, before in going_on:
            seq = chunk.seq
            tokens = seq.output_token_ids[before:]
            prompt_logprobs = self._new_prompt_logprobs(chunk.start, seq, result)
            if tokens or prompt_logprobs:
                self._deltas.append(make_delta(seq, tokens, result, prompt_logprobs))
            if seq.finish_reason is not None:
                self._forget(seq)

    def _new_prompt_logprobs(self, start: int, seq: Sequence, result: ChunkResult) -> list[TokenLogprobs] | None:
        """Those not reported yet: after a preemption the prompt is computed, and scored, a second time."""
        if result.prompt_logprobs is None:
            return None
        known = seq.num_prompt_logprobs - start
        new = result.prompt_logprobs[max(0, known) :]
        seq.num_prompt_logprobs += len(new)
        return new

    @staticmethod
    def _kinds(step: Step) -> dict[str, list]:
        """Who computed a piece of known text and who continued by one token, as the trace says it."""
        return {
            "prefill": [[c.seq.id, c.start, c.length] for c in step.chunks if not c.is_decode],
            "decode": [c.seq.id for c in step.chunks if c.is_decode],
        }

    def _emit_step(self, kinds: dict[str, list], seconds: float) -> None:
        self.trace.emit("step", **kinds, ms=round(seconds * 1e3, 3), free_blocks=self.scheduler.pool.num_free)

    # ----------------------------------------------------------------------------------------- numbers

    def stats(self) -> EngineStats:
        """The numbers of this moment; may be called from another thread."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        queries, hits = scheduler.prefix_cache_queries, scheduler.prefix_cache_hits
        free, cached = pool.num_free, pool.num_cached  # read once: the engine may go on meanwhile
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preempted=scheduler.preempted,
            kv_blocks_free=free,
            kv_blocks_cached=cached,
            kv_blocks_in_use=pool.num_blocks - free - cached,
            kv_blocks_total=pool.num_blocks,
            kv_bytes=self._kv_bytes,
            prefix_cache_queries=queries,
            prefix_cache_hits=hits,
            prefix_hit_rate=hits / queries if queries else 0.0,
            tokens_in=self._tokens_in,
            tokens_out=self._tokens_out,
            steps=self._steps,
            step_seconds=self._step_seconds,
            scheduler_seconds=self._step_seconds - self._runner_seconds,
        )

    def picture(self) -> Picture:
        """What the dashboard draws; between two steps, in the engine's thread."""
        return take_picture(self.scheduler, self.trace, list(self.changes))

    @property
    def gpu_uuid(self) -> str | None:
        """The card that is used, whatever is hidden and however they are counted; None on a CPU."""
        if not self.config.device.startswith("cuda"):
            return None
        return str(torch.cuda.get_device_properties(self.config.device).uuid)

    def close(self) -> None:
        """End what still runs, give back the memory and close the trace; a second call does nothing."""
        if self._closed:
            return
        for request_id in list(self._requests):
            self.cancel(request_id)
        self._closed = True
        self.trace.close()
        self._in_flight.clear()
        del self.runner
        if self.config.device.startswith("cuda"):
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()  # PyTorch would keep it for itself, and the next engine find no room
