"""The HTTP process's end of the engine, message by message."""

import asyncio

from labkit.config import SamplingParams
from labkit.engine.outputs import OutputProcessor
from labkit.engine.request import Delta, EngineRequest, StepReport
from labkit.engine.settings import Settings
from labkit.engine.stats import EngineStats
from labkit.server.engine import EngineClient
from labkit.server.messages import Steps
from tests.unit.server.fake_engine import byte_tokenizer


def steps(received, *deltas, stats=EngineStats()):  # noqa: B008 - it is frozen
    return Steps(StepReport(list(deltas)), stats, received)


def with_client(test):
    """Runs the test in an event loop, with a client that believes its model is loaded; nobody answers it."""

    async def run():
        client = EngineClient()
        client._processor = OutputProcessor(byte_tokenizer())
        try:
            await test(client)
        finally:
            await client.close()

    asyncio.run(run())


def times(token, finish=None):
    return Delta(
        "r1",
        0,
        [token],
        finish_reason=finish,
        arrival_time=0.0,
        first_scheduled_time=0.0,
        first_token_time=0.5,
        finished_time=1.0 if finish else None,
    )


def test_what_the_engine_adds_before_it_hears_of_the_stop_is_not_counted():
    async def test(client):
        stop = byte_tokenizer().encode("s")[0]
        request = EngineRequest("r1", [1], SamplingParams(stop="s", max_tokens=9))
        generation = client.submit([request], ["p"])  # its Add is message 1
        await client._take(steps(1, times(stop)))  # the answer ends here; message 2 tells the engine
        assert generation.finished
        await client._take(steps(1, times(7)))
        await client._take(steps(1, times(7, finish="length")))
        await client._take(steps(2))
        text = client.metrics.render().decode()
        assert 'labkit_requests_total{finish_reason="stop"} 1.0' in text
        assert 'labkit_requests_total{finish_reason="length"} 0.0' in text
        assert "labkit_time_to_first_token_seconds_count 1.0" in text
        assert client._stopped == {}, "forgotten once the engine knows"

    with_client(test)


def test_waiting_counts_what_is_on_its_way_only_where_no_place_is_free():
    async def test(client):
        client.settings = Settings(max_num_seqs=4)
        requests = [EngineRequest(f"r{i}", [1], SamplingParams(n=3)) for i in range(2)]
        client.submit(requests[:1], [None])
        assert client.waiting() == 0, "three answers, four places"
        client.submit(requests[1:], [None])
        assert client.waiting() == 2
        await client._take(steps(1, stats=EngineStats(running=3)))
        assert client.waiting() == 2
        await client._take(steps(2, stats=EngineStats(running=4, waiting=2)))
        assert client.waiting() == 2
        client.submit([EngineRequest("r9", [1], SamplingParams())], [None])
        assert client.waiting() == 3

    with_client(test)


def test_closing_a_generation_cancels_only_what_still_runs():
    async def test(client):
        requests = [EngineRequest(name, [1], SamplingParams(max_tokens=1)) for name in ("r1", "r2")]
        generation = client.submit(requests, [None, None])
        await client._take(steps(2, times(7, finish="length")))
        sent = client.child.sent
        generation.close()
        generation.close()
        assert client.child.sent == sent + 1, "r2, once"

    with_client(test)
