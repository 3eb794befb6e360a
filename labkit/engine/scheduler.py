"""The scheduler: who computes how many tokens in the next step, and whose blocks they go to.

There is no prefill phase and no decode phase. A sequence has tokens (prompt and output so far) of which some are
computed; a step computes some more, under one budget of tokens:

    1. sequences that run: one token each for those that wait for nothing else, then pieces of unfinished prompts
    2. waiting sequences, in the order of the policy, as long as slots, tokens and blocks are left

Chunked prefill, prefix hits (tokens that are computed already) and preemption (computed goes back to 0) follow from it.
When blocks run out, the sequence that ranks last gives up its own. The one that ranks first never does, so it ends
at some time, and then the next one is first: nobody waits for ever.

A step is scheduled, launched, and booked when its tokens have come back. The next one may be scheduled in between:

    schedule 1 ── launch ── schedule 2 ── launch ── book 1 ── schedule 3 ── launch ── book 2 ──    the host
                     └─────── step 1 ────────┘└────────── step 2 ──────────┘└─ step 3              the device

So what a step computes counts as computed from its launch on, and a token that it draws as pending. Who ends while a
step with it runs keeps slot and blocks until that step is booked. Who has to give up its blocks is only chosen when no
step runs: `schedule` returns None then, and is asked again.

In the trace every block that a sequence gets is in a `hit` (shared with others) or an `alloc` (its own), every block
that it leaves in a `free`; `admit` repeats the block table it starts with.
"""

from __future__ import annotations

import bisect

from labkit.cache import blocks, prefix
from labkit.config import EngineConfig
from labkit.engine.policies import POLICIES
from labkit.engine.request import Chunk, Sequence, Status, Step
from labkit.engine.trace import Trace


def chunk(uncomputed: int, left: int, budget: int, chunked: bool) -> int:
    """How many of a prompt's tokens a step takes; 0 to wait for another step.

    Args:
        uncomputed: tokens that could be computed.
        left: what is left of the step's budget.
        budget: the whole of it.
        chunked: prompts may be split. If not, one that is longer than any budget runs in a step of its own.
    """
    if chunked:
        return min(uncomputed, left)
    return uncomputed if uncomputed <= left or left == budget else 0


class Scheduler:
    """Sequences in, steps out; the results of a step come back through `book`.

    Args:
        config: with max_num_batched_tokens decided.
        num_blocks: size of the KV pool. Each sequence fits into it alone: RequestLimits sees to that.
        trace: gets the events, and says which step it is.

    Attributes:
        waiting: in the order of the policy.
        running: those that hold a slot, in the same order. Their blocks are theirs until they end or are preempted.
        preempted: how often a sequence was preempted so far.
        prefix_cache_queries: prompt tokens that were looked up so far, once for each sequence.
        prefix_cache_hits: of these, found.
    """

    def __init__(self, config: EngineConfig, *, num_blocks: int, trace: Trace):
        self.preempted = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._num_blocks_in_pool = num_blocks
        self._num_slots = config.max_num_seqs
        self._trace = trace
        self._follow(config)
        self.start_anew()

    def start_anew(self) -> None:
        """Forget all sequences and steps: every slot and every block is free, and nothing is cached."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.prefix = prefix.PrefixCache(self._config.block_size)
        self.pool = blocks.BlockPool(self._num_blocks_in_pool, on_evict=self._on_evict)
        self._free_slots = list(range(self._num_slots - 1, -1, -1))
        self._batch: list[Sequence] = []  # scheduler "static": who may run until all of them are done
        self._launched = 0  # steps that are not booked yet: the device may still read and write for them
        self._reserved = 0  # blocks that the holders of slots need in the worst case

    def _follow(self, config: EngineConfig) -> None:
        assert config.max_num_batched_tokens is not None, "the engine decides max_num_batched_tokens first"
        self._config = config
        self._budget: int = config.max_num_batched_tokens
        self._rank = POLICIES[config.policy].key
        self._seats = 1 if config.scheduler == "none" else config.max_num_seqs

    # ------------------------------------------------------------------------------------- from outside

    def reconfigure(self, config: EngineConfig) -> None:
        """From the next step on: another policy, budget or number of seats (not above the first), the cache on or off.

        Steps in flight stay as they are, and nobody who runs is sent away: with fewer seats than sequences that run,
        nobody joins until enough of them have ended.
        """
        if config.enable_prefix_caching and not self._config.enable_prefix_caching:
            self.prefix.forget_twins()
        self._follow(config)
        self.waiting.sort(key=self._rank)
        self.running.sort(key=self._rank)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        bisect.insort(self.waiting, seq, key=self._rank)

    def schedule(self) -> Step | None:
        """The next step, with a slot and blocks for everyone in it; None if nobody can run before a step is booked."""
        if self._launched and not self._has_blocks_to_go_on():
            return None
        step = Step(self._trace.step, self._trace.now(), chunks=[], admitted=[])
        if self._next_needs_own_step():
            self._admit(step, self._budget)
        if not step.chunks:
            left = self._continue_running(step)
            self._admit(step, left)
        if not step.chunks:
            return None
        self._launched += 1
        for part in step.chunks:
            seq = part.seq
            seq.num_computed += part.length
            seq.num_in_flight += part.length
            if part.draws:
                seq.num_pending += 1
                seq.token_on_device = True
        return step

    def book(self, step: Step, tokens: list[int | None]) -> list[Sequence]:
        """Book what a step computed: one drawn token (or None) for each of its chunks. Returns who finished by it.

        Steps are booked in the order in which they were scheduled.
        """
        finished = []
        self._launched -= 1
        for part, token in zip(step.chunks, tokens, strict=True):
            seq = part.seq
            if self._retire(part):  # it ended while the step ran
                continue
            self._keep_full_blocks(seq, part.start, part.start + part.length)
            if token is None:
                continue
            reason = seq.append(token)
            if seq.first_token_time is None:
                seq.first_token_time = self._trace.now()
                self._trace.emit("first_token", req=seq.id)
            if reason is not None:
                self.finish(seq, reason)
                finished.append(seq)
        return finished

    def abandon(self, step: Step) -> None:
        """Instead of `book`: the step failed, and nothing of it counts. Its sequences cannot go on; `finish` them."""
        self._launched -= 1
        for part in step.chunks:
            self._retire(part)

    def _retire(self, part: Chunk) -> bool:
        """The device is done with a chunk. True if its sequence has ended already, and nothing more of it counts."""
        seq = part.seq
        seq.num_in_flight -= part.length
        seq.num_pending -= part.draws
        if seq.status is Status.FINISHED and seq.num_in_flight == 0:
            self._release(seq)
        return seq.status is Status.FINISHED

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence. Its blocks are free at once, or when its last step is booked. A second call does nothing."""
        if seq.status is Status.FINISHED:
            return
        (self.waiting if seq.status is Status.WAITING else self.running).remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        if stop_reason is not None:
            seq.stop_reason = stop_reason
        seq.finished_time = self._trace.now()
        if reason == "abort":
            self._trace.emit("cancel", req=seq.id)
        else:
            self._trace.emit("finish", req=seq.id, reason=reason)
        if seq.slot is not None and seq.num_in_flight == 0:
            self._release(seq)

    # ------------------------------------------------------------------------------------- who runs on

    def _continue_running(self, step: Step) -> int:
        """Give each running sequence its share, the first in rank first. Returns what is left of the budget."""
        wanting = [seq for seq in self.running if not seq.has_drawn_all]
        decodes = min(self._budget, sum(seq.token_on_device for seq in wanting))
        left = self._budget - decodes  # prompts get what the decodes do not need
        prompt_chunks = []
        for seq in wanting:
            if seq.slot is None:  # preempted by one before it, and so are all that follow
                break
            if seq.token_on_device:
                if decodes and (part := self._next_chunk(seq, 1)):
                    step.chunks.append(part)
                    decodes -= 1
            elif left:
                length = chunk(seq.num_uncomputed, left, self._budget, self._config.enable_chunked_prefill)
                if length and (part := self._next_chunk(seq, length)):
                    prompt_chunks.append(part)
                    left -= length
        step.chunks += prompt_chunks
        return left

    def _next_chunk(self, seq: Sequence, length: int) -> Chunk | None:
        """Its next `length` tokens, with the blocks they need. None: it ranked last and had to give up its own."""
        new: list[int] = []
        missing = self._num_blocks(seq.num_computed + length) - len(seq.block_table)
        if missing > 0:
            if not self._make_room(seq, missing):
                return None
            new = self.pool.take(missing)
            seq.block_table += new
            self._trace.emit("alloc", req=seq.id, blocks=new)
        draws = length == seq.num_uncomputed
        return Chunk(seq, seq.num_computed, length, new, draws, is_decode=seq.token_on_device)

    def _has_blocks_to_go_on(self) -> bool:
        """Whether all that run can be given their next chunk without a preemption."""
        available = self.pool.num_available
        if available >= len(self.running) + self._num_blocks(self._budget):  # so nearly always, and quickly seen
            return True
        needed = 0
        for seq in self.running:
            if not seq.has_drawn_all:
                length = 1 if seq.token_on_device else min(seq.num_uncomputed, self._budget)
                needed += max(0, self._num_blocks(seq.num_computed + length) - len(seq.block_table))
        return needed <= available

    def _make_room(self, seq: Sequence, missing: int) -> bool:
        """Preempt, from the last in rank, until that many blocks can be taken. False: `seq` had to go itself."""
        while self.pool.num_available < missing:
            assert self._launched == 0, "the device still writes into the blocks of whoever would be chosen"
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue, with nothing computed. What it wrote stays in the prefix cache until it is evicted."""
        self._trace.emit("preempt", req=seq.id)
        self.running.remove(seq)
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_computed = 0
        seq.num_preemptions += 1
        self.preempted += 1
        self.add(seq)

    # ------------------------------------------------------------------------------------- who joins

    @staticmethod
    def pick(waiting: list[Sequence]) -> Sequence:
        """Who is admitted next, of those that may be, given in the order of the policy. The rest wait behind it."""
        return waiting[0]

    def _pick(self, candidates: list[Sequence]) -> Sequence:
        return type(self).pick(candidates)  # through the class, so that a plain function can stand in for it

    def _admit(self, step: Step, left: int) -> None:
        """Let waiting sequences in until one finds no slot, no tokens or no blocks: nobody overtakes it."""
        if not (self.waiting and self._may_admit(left)):
            return
        candidates = self._candidates()
        while candidates and self._may_admit(left):
            seq = self._pick(candidates)
            found = self._find_prefix(seq)
            uncomputed = seq.num_tokens - len(found) * self._config.block_size
            length = chunk(uncomputed, left, self._budget, self._config.enable_chunked_prefill)
            if length == 0 or not self._has_room(seq, found):
                return
            candidates.remove(seq)
            self._start(seq, found, length, step)
            left -= length

    def _may_admit(self, left: int) -> bool:
        return left > 0 and bool(self._free_slots) and len(self.running) < self._seats

    def _candidates(self) -> list[Sequence]:
        if self._config.scheduler == "static":
            return self._static_batch()
        return [seq for seq in self.waiting if not self._waits_for_leader(seq)]

    def _static_batch(self) -> list[Sequence]:
        """Those of the batch that wait. A new batch is chosen when all of the old one are done."""
        self._batch = [seq for seq in self._batch if seq.status is not Status.FINISHED]
        if not self._batch and not self.running:
            queue = list(self.waiting)
            while queue and len(self._batch) < self._seats:
                self._batch.append(self._pick(queue))
                queue.remove(self._batch[-1])
        return [seq for seq in self._batch if seq.status is Status.WAITING]

    @staticmethod
    def _waits_for_leader(seq: Sequence) -> bool:
        """A further choice of a request waits until the first one has computed the prompt, to share its blocks."""
        leader = seq.leader
        if leader is None or leader.status is Status.FINISHED or leader.num_preemptions:
            return False
        return not leader.prompt_is_computed

    def _next_needs_own_step(self) -> bool:
        """Without chunks: is a prompt next that no budget holds? The decodes then sit out one step."""
        if self._config.enable_chunked_prefill or not (self.waiting and self._may_admit(self._budget)):
            return False
        candidates = self._candidates()
        return bool(candidates) and self._pick(candidates).num_tokens > self._budget

    def _has_room(self, seq: Sequence, found: list[int]) -> bool:
        """May it be admitted, as far as blocks go?

        "reserve" adds up worst cases. "optimistic" wants room for what is known now: with less, a long prompt would
        be admitted, run out of blocks half-way and give up again. It also keeps out who was preempted in this step:
        fewer blocks are available than it gave up.
        """
        if self._config.admission == "reserve":
            return self._reserved + self._worst_case(seq) <= self.pool.num_blocks
        idle = sum(self.pool.num_users(block) == 0 for block in found)  # they are available until they are shared
        return self._num_blocks(seq.num_tokens) - len(found) <= self.pool.num_available - idle

    def _start(self, seq: Sequence, found: list[int], length: int, step: Step) -> None:
        """Give it a slot, the blocks that were found and its first chunk."""
        self.waiting.remove(seq)
        bisect.insort(self.running, seq, key=self._rank)
        seq.status = Status.RUNNING
        seq.slot = self._free_slots.pop()
        self._reserved += self._worst_case(seq)
        seq.num_computed = cached = len(found) * self._config.block_size
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = self._trace.now()
            seq.num_cached_tokens = cached
            if self._reads_cache(seq):
                self.prefix_cache_queries += seq.num_prompt_tokens
                self.prefix_cache_hits += cached
        if found:
            self.pool.share(found)
            seq.block_table = list(found)
            self._trace.emit("hit", req=seq.id, tokens=cached, blocks=found)
        first = self._next_chunk(seq, length)
        assert first is not None, "_has_room saw enough blocks"
        step.chunks.append(first)
        step.admitted.append(seq)
        self._trace.emit("admit", req=seq.id, blocks=list(seq.block_table), cached=cached)

    # ------------------------------------------------------------------------------------- blocks

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _worst_case(self, seq: Sequence) -> int:
        """Blocks it fills if it runs to max_tokens. Nobody needs keys and values of the last token."""
        return self._num_blocks(seq.num_prompt_tokens + seq.max_tokens - 1)

    def _release(self, seq: Sequence) -> None:
        """Take back its slot and its blocks."""
        assert seq.slot is not None
        self._free_slots.append(seq.slot)
        self._reserved -= self._worst_case(seq)
        self.pool.give_back(seq.block_table)
        if seq.block_table:
            self._trace.emit("free", req=seq.id, blocks=seq.block_table)
        seq.slot = None
        seq.block_table = []
        seq.token_on_device = False

    def _reads_cache(self, seq: Sequence) -> bool:
        """Scoring a prompt needs the logits of every position, so it computes them all."""
        return self._config.enable_prefix_caching and seq.params.prompt_logprobs is None

    def _find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that hold its first tokens already: the leader's, or what the prefix cache knows."""
        shared: list[int] = []
        leader = seq.leader
        if leader is not None and leader.status is Status.RUNNING and leader.prompt_is_computed:
            shared = leader.block_table[: (seq.num_prompt_tokens - 1) // self._config.block_size]
        found: list[int] = []
        if self._reads_cache(seq):
            found = self.prefix.lookup(seq.token_ids(0, seq.num_tokens))
        return max(found, shared, key=len)

    def _keep_full_blocks(self, seq: Sequence, start: int, stop: int) -> None:
        """Enter the blocks in the prefix cache that were filled by computing positions start to stop - 1."""
        if not self._config.enable_prefix_caching:
            return
        size = self._config.block_size
        for index in range(start // size, stop // size):
            block = seq.block_table[index]
            parent = seq.block_table[index - 1] if index else None
            if self.prefix.enter(block, seq.token_ids(index * size, (index + 1) * size), parent):
                self.pool.keep(block)

    def _on_evict(self, block: int) -> None:
        self.prefix.remove(block)
        self._trace.emit("evict", block=block)
