"""Steps padded to a graph's size draw what the same steps draw without; the recording itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from labkit.config import GRAPH_TOKENS
from labkit.engine import runner
from labkit.engine.graphs import Recording, StepGraphs, padded_sequences, padded_tokens
from labkit.kernels import backend
from tests.unit.engine.test_runner import Engine, prompts
from tests.unit.models.test_decoder import reference

CPU = torch.device("cpu")


class Unrecorded(StepGraphs):
    """Computes when a graph would be replayed."""

    def _record(self, compute: Callable[[Tensor], Tensor], numbers: Tensor) -> Recording:
        tokens = compute(numbers)
        return Recording(numbers, tokens, lambda: tokens.copy_(compute(numbers)))


@pytest.mark.parametrize(
    ("padded", "most", "sizes"),
    [
        (padded_sequences, 256, [1, 2, 4, 8, *range(16, 257, 16)]),
        (padded_tokens, GRAPH_TOKENS, [*range(128, 1025, 128), *range(1280, 2049, 256)]),
    ],
)
def test_sizes(padded: Callable[[int], int], most: int, sizes: list[int]) -> None:
    found = [padded(count) for count in range(1, most + 1)]
    assert all(size >= count for count, size in enumerate(found, 1))
    assert sorted(set(found)) == sizes


def test_each_key_is_recorded_once_and_with_nothing_but_padding() -> None:
    seen: list[list[int]] = []

    def compute(numbers: Tensor) -> Tensor:
        seen.append(numbers.tolist())
        return numbers.long() * 10

    graphs = Unrecorded(CPU)
    for key, *numbers in (("a", 1, 2), ("a", 3, 4), ("b", 5)):
        given = np.array(numbers, np.int32)
        tokens = graphs.run(key, compute, given, np.zeros_like(given))
        assert tokens.tolist() == [10 * number for number in numbers]
    assert seen == [[0, 0], [1, 2], [3, 4], [0], [5]]
    assert set(graphs.recordings) == {"a", "b"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_padded_steps_draw_what_they_draw_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts alone, prompts beside decodes in two pieces, three decodes in a batch of four, one alone."""
    if backend.unavailable("triton", CPU) is not None:
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(runner, "padded_tokens", lambda count: -(-count // 16) * 16)  # the interpreter is slow
    model = reference("qwen3")
    params = [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "top_k": 7, "seed": 6}]
    answers = []
    for graphs in (False, True):
        engine = Engine(model, kernels="triton")
        if graphs:
            engine.runner.graphs = Unrecorded(CPU)
        seqs = [engine.sequence(p, slot, **wish) for slot, (p, wish) in enumerate(zip(prompts(7, 3, 14), params))]
        engine.step([(seqs[0], 7), (seqs[1], 2)])
        engine.step([(seqs[0], 1), (seqs[1], 1), (seqs[2], 9)])
        engine.step([(seqs[0], 1), (seqs[1], 1), (seqs[2], 5)])
        engine.finish(seqs, 4)
        engine.finish(seqs[:1], 5)
        answers.append([seq.output_token_ids for seq in seqs])
        assert not graphs or {key[:2] for key in engine.runner.graphs.recordings} == {
            ("mixed", 16),
            ("decode", 1),
            ("decode", 2),
            ("decode", 4),
        }
    assert answers[0] == answers[1]
