"""In bfloat16, with batch_invariant, a request draws the same tokens alone and in a crowd."""

from __future__ import annotations

import pytest
import torch

from labkit.config import SamplingParams
from labkit.kernels.invariant_linear import invariant_linear
from labkit.llm import LLM

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("width", "outputs"), [(1024, 4096), (3072, 1024), (576, 49152), (2048, 130)])
def test_a_row_is_the_same_in_every_batch(width: int, outputs: int) -> None:
    x = torch.randn(700, width, device="cuda").bfloat16()
    weight = torch.randn(outputs, width, device="cuda").bfloat16()
    want = invariant_linear(x, weight)
    torch.testing.assert_close(want, torch.nn.functional.linear(x, weight), atol=0.5, rtol=2e-2)
    for first, last in ((0, 1), (5, 7), (64, 128), (100, 165), (3, 300)):
        assert torch.equal(invariant_linear(x[first:last], weight), want[first:last])


@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_alone_and_among_63_others(graphs: bool) -> None:
    prompts = [[(i * 31 + j * 7) % 200 + 3 for j in range(1 + 9 * i)] for i in range(64)]
    params = [
        SamplingParams(temperature=0.9 if i % 2 else 0.0, seed=i, ignore_eos=True, max_tokens=20 + i) for i in range(64)
    ]
    # The budget cuts prompts into other pieces in a crowd than alone.
    llm = LLM("toy", dtype="bfloat16", batch_invariant=True, cuda_graphs=graphs, max_num_batched_tokens=300, quiet=True)
    try:
        crowd = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
        for i in (0, 1, 13, 40, 63):
            [out] = llm.generate([prompts[i]], params[i], use_tqdm=False)
            assert list(out.outputs[0].token_ids) == crowd[i], i
    finally:
        llm.close()
