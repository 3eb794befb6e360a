"""A world for the scheduler to act in: a model and a KV cache that are exact, tiny and never forgive.

The "keys and values" at a position are a number that stands for all tokens up to it, made from the number at the
position before, as it lies in the cache, and the position's token. A wrong, stale or not yet written block therefore
shows at once, and changes every later token.
"""

from __future__ import annotations

from collections import Counter, deque

from labkit.config import EngineConfig, SamplingParams
from labkit.engine.request import Chunk, Sequence, Status, Step
from labkit.engine.scheduler import Scheduler
from labkit.engine.trace import Trace

VOCABULARY = 7
EOS = 6
_numbers: dict[tuple[int, int], int] = {}


def prefix_number(before: int, token: int) -> int:
    """A number of its own for each sequence of tokens, given the number of all but the last one."""
    return _numbers.setdefault((before, token), len(_numbers) + 1)


def draw(number: int, seq: Sequence) -> int:
    """The next token: a fixed function of everything before it, the seed and the choice."""
    return hash((number, seq.seed, seq.index, 12345)) // 64 % VOCABULARY


def alone(seq: Sequence) -> list[int]:
    """What a sequence must give, whoever it shares the engine with."""
    number, out = 0, []
    for token in seq.prompt_token_ids:
        number = prefix_number(number, token)
    while len(out) < seq.max_tokens:
        out.append(draw(number, seq))
        if out[-1] in seq.eos_token_ids:
            break
        number = prefix_number(number, out[-1])
    return out


def make_request(number: int, prompt: list[int], max_tokens: int = 8, n: int = 1, eos: bool = False, **params):
    """The sequences of one request, as the core makes them. EOS ends them only if `eos`."""
    out: list[Sequence] = []
    for index in range(n):
        seq = Sequence(
            id=f"r{number}/{index}",
            request_id=f"r{number}",
            index=index,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, n=n, **params),
            seed=number % 3,
            max_tokens=max_tokens,
            eos_token_ids=frozenset({EOS} if eos else ()),
            number=number,
            arrival_time=0.0,
            leader=out[0] if out else None,
        )
        out.append(seq)
    return out


class Flight:
    """A step on the device, with what the host has uploaded for it."""

    def __init__(self, step: Step, fails: bool):
        self.step, self.fails = step, fails
        self.slots = {c.seq: c.seq.slot for c in step.chunks}
        self.tables = {c.seq: list(c.seq.block_table) for c in step.chunks}
        self.known = {c.seq: c.seq.token_ids(c.start, c.start + c.length) for c in step.chunks if not c.is_decode}
        self.known |= {c.seq: [] for c in step.chunks if c.is_decode}


class World:
    """Scheduler, fake runner and checks. `step()` is one round of the engine; the host is `behind` steps behind."""

    def __init__(self, num_blocks: int, behind: int = 0, **config):
        fields = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16, **config}
        self.config = EngineConfig(**fields)
        self.slots = self.config.max_num_seqs
        self.trace = Trace()
        self.scheduler = Scheduler(self.config, num_blocks=num_blocks, trace=self.trace)
        self.kv: list[list[int | None]] = [[None] * self.config.block_size for _ in range(num_blocks)]
        self.tables: dict[int, list[int]] = {}  # by slot, as the device knows them
        self.last_token: dict[int, int] = {}  # by slot, as the device drew them
        self.behind = behind
        self.flights: deque[Flight] = deque()
        self.sequences: list[Sequence] = []
        self.events: list[dict] = []  # of the trace, so far
        self.told: Counter[int] = Counter()  # users of each block, going by these events
        self.steps: list[list[tuple[str, int, int]]] = []  # (id, start, length) of each step's chunks

    @property
    def pool(self):
        return self.scheduler.pool

    def add(self, sequences: list[Sequence]) -> list[Sequence]:
        for seq in sequences:
            self.sequences.append(seq)
            self.scheduler.add(seq)
        return sequences

    def change(self, **fields) -> None:
        """Other settings from the next step on."""
        self.config = self.config.replace(**fields)
        self.scheduler.reconfigure(self.config)
        self.check_blocks()

    # ---------------------------------------------------------------- one round

    def step(self, cancel: tuple[Sequence, ...] = (), fail: bool = False) -> Step | None:
        """Schedule and launch; then book what the device has done.

        With `behind` steps in flight the device is as late as it can be: it does a step's work just before the step is
        booked. `cancel` go away while steps run; with `fail` nothing is computed.
        """
        self.trace.step += 1
        step = self.scheduler.schedule()
        self.check_blocks()
        if step is not None:
            self.check_step(step)
            self.steps.append([(c.seq.id, c.start, c.length) for c in step.chunks])
            self.flights.append(Flight(step, fail))
        for seq in cancel:
            self.scheduler.finish(seq, "abort")
        self.check_blocks()
        while len(self.flights) > (self.behind if step is not None else 0):
            self.land()
        return step

    def land(self) -> None:
        """The device does the oldest step in flight, and it is booked."""
        flight = self.flights.popleft()
        step = flight.step
        if flight.fails:
            self.scheduler.abandon(step)
            for c in step.chunks:
                self.scheduler.finish(c.seq, "error")
        else:
            tokens = self.execute(flight)
            ended = [c.seq for c in step.chunks if c.seq.status is Status.FINISHED]
            finished = self.scheduler.book(step, tokens)
            new = [c.seq for c in step.chunks if c.seq.finish_reason in ("stop", "length") and c.seq not in ended]
            assert finished == new
        self.check_blocks()

    def run(self, most: int = 10_000) -> int:
        """Steps until nobody is left and nothing runs."""
        count = 0
        while self.scheduler.waiting or self.scheduler.running or self.flights:
            flying = len(self.flights)
            assert self.step() is not None or flying, "somebody waits but nobody runs"
            count += 1
            assert count <= most, f"not done after {most} steps"
        return count

    def execute(self, flight: Flight) -> list[int | None]:
        step = flight.step
        for c in step.chunks:
            assert c.seq.slot == flight.slots[c.seq], "its slot is its own until the step is booked"
            table = flight.tables[c.seq]
            assert table == c.seq.block_table[: len(table)], "its blocks are its own until the step is booked"
            self.tables[c.seq.slot] = table
        for seq in step.admitted:
            self.last_token.pop(seq.slot, None)
        living = [c for c in step.chunks if c.seq.status is not Status.FINISHED]
        for c in living:  # before anything is written: a block found must be complete
            self.check_contents(c.seq, c.start)
        tokens = [self.compute(c, flight.known[c.seq]) if c in living else self.spoil(c) for c in step.chunks]
        for c in living:  # and nobody wrote over another's
            self.check_contents(c.seq, c.start + c.length)
        return tokens

    def spoil(self, c: Chunk) -> int | None:
        """Its sequence has ended meanwhile: the device writes and draws something for it that is of no use."""
        for position in range(c.start, c.start + c.length):
            block = self.tables[c.seq.slot][position // self.config.block_size]
            self.kv[block][position % self.config.block_size] = None
        return EOS if c.draws else None

    def compute(self, c: Chunk, known: list[int]) -> int | None:
        """Write the chunk's positions; draw if it reaches the last known token."""
        seq, table = c.seq, self.tables[c.seq.slot]
        if c.is_decode:
            known = [self.last_token[seq.slot]]
        assert known == seq.token_ids(c.start, c.start + c.length)
        number = self.cell(table, c.start - 1) if c.start else 0
        for position, token in enumerate(known, start=c.start):
            block, offset = table[position // self.config.block_size], position % self.config.block_size
            assert self.pool.num_users(block) == 1, f"{seq.id} writes into shared block {block}"
            number = self.kv[block][offset] = prefix_number(number, token)
        assert c.draws == (c.start + c.length == seq.num_tokens)
        if not c.draws:
            return None
        self.last_token[seq.slot] = draw(number, seq)
        return self.last_token[seq.slot]

    def cell(self, table: list[int], position: int) -> int | None:
        size = self.config.block_size
        return self.kv[table[position // size]][position % size]

    # ---------------------------------------------------------------- checks

    def check_contents(self, seq: Sequence, stop: int) -> None:
        number = 0
        for position, token in enumerate(seq.token_ids(0, stop)):
            number = prefix_number(number, token)
            found = self.cell(self.tables[seq.slot], position)
            assert found == number, f"{seq.id}: position {position} holds {found}, not its own prefix"

    def check_step(self, step: Step) -> None:
        config, chunks = self.config, step.chunks
        assert len({c.seq.id for c in chunks}) == len(chunks) <= self.slots
        if step.admitted:
            assert len(self.scheduler.running) <= config.max_num_seqs, "more than seats"
        assert all(c.length >= 1 and c.start + c.length == c.seq.num_computed for c in chunks)
        taken = {block for c in chunks for block in c.new_blocks}
        for flight in self.flights:
            assert taken.isdisjoint(b for table in flight.tables.values() for b in table), "a step still runs on it"
        assert all(c.seq.status is Status.RUNNING for c in chunks)
        kinds = [c.is_decode for c in chunks]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        if step.num_tokens > config.max_num_batched_tokens:
            assert not config.enable_chunked_prefill and len(chunks) == 1, "over the budget"
        if not config.enable_chunked_prefill:
            assert all(c.draws for c in chunks), "a prompt was split"
        if config.scheduler == "none":
            assert len(self.scheduler.running) <= 1
        if config.admission == "reserve":
            assert self.scheduler.preempted == 0
        slots = [seq.slot for seq in self.scheduler.running]
        assert len(set(slots)) == len(slots) and all(0 <= slot < self.slots for slot in slots)

    def check_blocks(self) -> None:
        """Nothing lost, nothing given twice, and the trace tells the same story."""
        pool, holders = self.pool, [seq for seq in self.sequences if seq.slot is not None]
        users = Counter(block for seq in holders for block in seq.block_table)
        assert [pool.num_users(block) for block in range(pool.num_blocks)] == [users[b] for b in range(pool.num_blocks)]
        assert pool.num_in_use == len(users)
        assert pool.num_free + pool.num_cached + pool.num_in_use == pool.num_blocks
        while self.trace.events:
            event = self.trace.events.popleft()
            self.events.append(event)
            if event["ev"] in ("hit", "alloc"):
                self.told.update(event["blocks"])
            elif event["ev"] == "free":
                self.told.subtract(event["blocks"])
        assert +self.told == users

    def check_idle(self) -> None:
        """Everybody has ended: all is back, and each answer is what its request gives alone."""
        assert self.pool.num_in_use == 0
        assert self.pool.num_free + self.pool.num_cached == self.pool.num_blocks
        assert not self.scheduler.running and not self.scheduler.waiting
        assert all(seq.slot is None and seq.block_table == [] for seq in self.sequences)
        for seq in self.sequences:
            want = alone(seq)
            if seq.finish_reason in ("stop", "length"):
                assert seq.output_token_ids == want, seq.id
                assert (seq.finish_reason == "stop") == (want[-1] in seq.eos_token_ids)
            else:
                assert seq.output_token_ids == want[: len(seq.output_token_ids)], seq.id
            self.check_life(seq)

    def check_life(self, seq: Sequence) -> None:
        life = [e["ev"] for e in self.events if e.get("req") == seq.id]
        assert life.count("finish") + life.count("cancel") == 1
        assert life.count("first_token") == (1 if seq.output_token_ids else 0)
        assert life.count("preempt") == seq.num_preemptions
        assert life.count("admit") in (seq.num_preemptions, seq.num_preemptions + 1)
        if seq.output_token_ids:
            assert life.index("admit") < life.index("first_token")
            assert seq.first_scheduled_time <= seq.first_token_time <= seq.finished_time
