"""Batches padded to a graph's size draw what the same batches draw without; the recording itself needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from labkit.engine.graphs import Decode, DecodeGraphs, Recording, batch_size
from labkit.kernels import backend
from tests.unit.engine.test_runner import Engine, prompts
from tests.unit.models.test_decoder import reference

CPU = torch.device("cpu")


class Unrecorded(DecodeGraphs):
    """Computes when a graph would be replayed."""

    def _record(self, decode: Decode, size: int, filtered: bool) -> Recording:
        rows = torch.empty(5, size, dtype=torch.int32)
        tokens = torch.empty(size, dtype=torch.int64)
        return Recording(rows, tokens, lambda: tokens.copy_(decode(rows, filtered)))


def test_sizes() -> None:
    sizes = [batch_size(count) for count in range(1, 257)]
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [1, 2, 4, 8, *range(16, 257, 16)]


def test_rows_are_padded_and_each_size_is_recorded_once() -> None:
    seen: list[list[list[int]]] = []

    def decode(rows: Tensor, filtered: bool) -> Tensor:
        seen.append(rows.tolist())
        return rows[0].long() * 10 + filtered

    graphs = Unrecorded([9, 0, 9, 0, 7], 16, CPU)
    rows = np.arange(15, dtype=np.int32).reshape(5, 3)
    assert graphs.run(decode, rows, False) == [0, 10, 20]
    assert seen == [[[0, 1, 2, 9], [3, 4, 5, 0], [6, 7, 8, 9], [9, 10, 11, 0], [12, 13, 14, 7]]]
    assert graphs.run(decode, rows, True) == [1, 11, 21]
    assert graphs.run(decode, rows[:, :1], False) == [0]
    assert graphs.run(decode, rows[:, [0, 1, 2, 0]], False) == [0, 10, 20, 0]
    assert set(graphs._recordings) == {(4, False), (4, True), (1, False)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_padded_batch_draws_what_it_draws_alone() -> None:
    """Three in a batch of four, over the edges of blocks, then one alone."""
    if backend.unavailable("triton", CPU) is not None:
        pytest.skip("needs Triton's interpreter")
    model = reference("qwen3")
    params = [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "top_k": 7, "seed": 6}]
    answers = []
    for graphs in (False, True):
        engine = Engine(model, kernels="triton")
        if graphs:
            runner = engine.runner
            runner._graphs = Unrecorded(runner._padding, 4, CPU)
        seqs = [engine.sequence(p, slot, **wish) for slot, (p, wish) in enumerate(zip(prompts(7, 3, 14), params))]
        engine.step([(seq, seq.num_prompt_tokens) for seq in seqs])
        engine.finish(seqs[1:], 2)
        engine.finish(seqs, 5)
        answers.append([seq.output_token_ids for seq in seqs])
        assert not graphs or {key[0] for key in runner._graphs._recordings} == {1, 2, 4}
    assert answers[0] == answers[1]
