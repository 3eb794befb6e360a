"""What crosses the process boundary arrives as it was sent."""

import pytest

from labkit.config import EngineConfig, SamplingParams
from labkit.engine.limits import RequestLimits
from labkit.engine.request import Delta, EngineRequest, StepReport, TokenLogprobs
from labkit.engine.stats import EngineStats
from labkit.server.messages import (
    Add,
    Cancel,
    Failed,
    Launch,
    Ready,
    Shutdown,
    Steps,
    Stop,
    decode_from_engine,
    decode_to_engine,
    encode,
)

PARAMS = SamplingParams(
    n=2, max_tokens=None, logit_bias={7: -1.5}, seed=2**64 - 1, stop="x", stop_token_ids=[3], logprobs=2
)
DELTA = Delta("r1", 0, [5], [TokenLogprobs(5, -0.1, 1, [5, 6], [-0.1, -2.0])], finish_reason="stop", stop_reason="x")


@pytest.mark.parametrize(
    "message",
    [
        Launch("toy", EngineConfig(max_num_seqs=3), "t.jsonl"),
        Add(EngineRequest("r1", [1, 2, 3], PARAMS)),
        Cancel("r1"),
        Stop("r1", 1, "end"),
        Shutdown(),
    ],
)
def test_to_the_engine(message):
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready(RequestLimits(512, 300, 4096), EngineConfig(), EngineStats()),
        Failed("no such model"),
        Steps(StepReport([DELTA], 4, 0.5), EngineStats(running=1), 7),
    ],
)
def test_from_the_engine(message):
    assert decode_from_engine(encode(message)) == message
