"""The sampler with Triton's fused draw draws what it draws kind by kind, and keeps the same counts."""

from __future__ import annotations

import pytest
import torch

from labkit.config import SamplingParams
from labkit.engine.request import Chunk, Sequence
from labkit.engine.sampler import Sampler
from labkit.kernels.jit import interpreted, triton

VOCAB = 61
CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.8, repetition_penalty=1.5, seed=2),
    SamplingParams(temperature=1.0, logit_bias={3: 4.0, 60: -5.0}, min_tokens=4, presence_penalty=1.0, seed=3),
]


@pytest.mark.skipif(triton is None or not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_fused_and_kind_by_kind_agree() -> None:
    seqs = [Sequence(f"s{i}", f"s{i}", 0, [5, 6, 7], p, i, 8, frozenset({2}), i, 0.0) for i, p in enumerate(PARAMS)]
    for seq, slot in zip(seqs, (3, 0, 2, 1), strict=True):
        seq.slot = slot
    samplers = [Sampler(4, VOCAB, CPU), Sampler(4, VOCAB, CPU, fused=True)]
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        logits = torch.randn(4, VOCAB, generator=generator)
        drawn = []
        for sampler in samplers:
            plan = sampler.plan([Chunk(seq, 2 + step, 1, [], True, True) for seq in seqs], [] if step else seqs)
            sampler.admit(torch.from_numpy(plan.parameters), torch.from_numpy(plan.history))
            slots = torch.tensor([chunk.seq.slot for chunk in plan.chunks], dtype=torch.int32)
            positions = torch.full((4,), 3 + step, dtype=torch.int32)
            changes = torch.from_numpy(plan.adjustments), torch.from_numpy(plan.penalised)
            tokens = sampler.draw(plan, logits[slots], slots, positions, *changes)  # plans differ in their order
            drawn.append(dict(zip(slots.tolist(), tokens.tolist(), strict=True)))
        assert drawn[0] == drawn[1]
    assert samplers[0]._counts is not None and samplers[1]._counts is not None
    assert torch.equal(samplers[0]._counts[1:3], samplers[1]._counts[1:3])  # the slots with penalties
