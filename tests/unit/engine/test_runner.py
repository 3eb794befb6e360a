"""The runner against transformers: chunks, ragged batches, decodes, slots that are used again, and every request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from labkit.config import EngineConfig, SamplingParams
from labkit.engine.request import Chunk, ChunkResult, Sequence, Step
from labkit.engine.runner import Runner
from labkit.kernels import backend
from tests.unit.models.test_decoder import MODELS, decoder_of, reference

BLOCK = 8
VOCAB = 101


class Engine:
    """The least scheduler there can be: blocks are handed out in a scattered order and never given back."""

    def __init__(self, model: Any, slots: int = 4, num_blocks: int = 80, kernels: str = "torch"):
        decoder = decoder_of(model, kernels)
        config = EngineConfig(block_size=BLOCK, max_num_seqs=slots)
        kind = {"device": torch.device("cpu"), "dtype": torch.float32}
        self.runner = Runner(decoder, config, num_blocks=num_blocks, max_model_len=256, **kind)  # type: ignore[arg-type]
        self.blocks: Iterator[int] = iter([(i * 37) % num_blocks for i in range(num_blocks)])
        assert num_blocks % 37

    def sequence(self, prompt: list[int], slot: int, **params: Any) -> Sequence:
        p = SamplingParams(**({"temperature": 0, "max_tokens": 64} | params))
        seed = p.seed or 0
        return Sequence("s", "s", 0, prompt, p, seed, 64, frozenset([2]), number=0, arrival_time=0.0, slot=slot)

    def chunk(self, seq: Sequence, length: int) -> Chunk:
        need = -(-(seq.num_computed + length) // BLOCK) - len(seq.block_table)
        new = [next(self.blocks) for _ in range(need)]
        seq.block_table += new
        draws = seq.num_computed + length == seq.num_tokens
        return Chunk(seq, seq.num_computed, length, new, draws, seq.token_on_device)

    def step(self, work: list[tuple[Sequence, int]], admitted: list[Sequence] | None = None) -> list[ChunkResult]:
        """Runs (sequence, tokens) pairs and books the results."""
        fresh = [seq for seq, _ in work if not seq.block_table] if admitted is None else admitted
        chunks = [self.chunk(seq, length) for seq, length in work]
        # Decodes come first, as the scheduler has it; results are wanted in the order of the work.
        step = Step(0, 0.0, sorted(chunks, key=lambda chunk: not chunk.is_decode), fresh)
        results = self.runner.launch(step).results()
        found = {chunk.seq: result for chunk, result in zip(step.chunks, results, strict=True)}
        for chunk, result in zip(step.chunks, results, strict=True):
            chunk.seq.num_computed += chunk.length
            assert (result.token is not None) == chunk.draws
            if result.token is not None:
                chunk.seq.append(result.token)
                chunk.seq.token_on_device = True
        return [found[seq] for seq, _ in work]

    def finish(self, seqs: list[Sequence], tokens: int) -> None:
        """Decodes all of them together until each has this many output tokens."""
        while left := [seq for seq in seqs if len(seq.output_token_ids) < tokens]:
            self.step([(seq, 1) for seq in left])


@torch.inference_mode()
def want_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V], transformers' own."""
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


# Ways to scale RoPE differ in its table alone, which no kernel makes: the interpreter, slow as it is, need not see all.
IN_TRITON = [name for name, (_, fields) in MODELS.items() if "rope_parameters" not in fields]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [(name, "torch") for name in MODELS] + [pytest.param(name, "triton", marks=pytest.mark.slow) for name in IN_TRITON],
)
def test_chunks_and_ragged_decodes_agree_with_transformers(name: str, kernels: str) -> None:
    """Prompts of several lengths in pieces of several sizes, in the same steps as the decodes of others."""
    if kernels == "triton" and backend.unavailable("triton", torch.device("cpu")) is not None:
        pytest.skip("needs Triton's interpreter")
    model = reference(name)
    engine = Engine(model, kernels=kernels)
    seqs = [engine.sequence(p, slot, logprobs=3) for slot, p in enumerate(prompts(1, 8, 37, 70))]
    a, b, c, d = seqs
    found: dict[int, list[Any]] = {id(seq): [] for seq in seqs}
    for work in (
        [(a, 1), (b, 5)],
        [(a, 1), (b, 3), (c, 16)],
        [(a, 1), (b, 1), (c, 21), (d, 9)],
        [(a, 1), (b, 1), (c, 1), (d, 61)],
        *[[(seq, 1) for seq in seqs]] * 12,
    ):
        for (seq, _), result in zip(work, engine.step(work), strict=True):
            if result.logprobs is not None:
                found[id(seq)].append(result.logprobs)
    for seq in seqs:
        want = want_logprobs(model, seq.prompt_token_ids + seq.output_token_ids)
        for i, got in enumerate(found[id(seq)]):
            row = want[seq.num_prompt_tokens - 1 + i]
            assert row[got.token] >= row.max() - 1e-4
            assert got.rank == 1 and got.token == seq.output_token_ids[i]
            assert abs(got.logprob - row[got.token]) < 1e-4
            torch.testing.assert_close(row[got.top_ids], torch.tensor(got.top_logprobs), atol=1e-4, rtol=0)
            torch.testing.assert_close(torch.tensor(got.top_logprobs), row.topk(3).values, atol=1e-4, rtol=0)


def test_prompt_logprobs_in_pieces() -> None:
    model = reference("mistral")
    engine = Engine(model)
    (prompt,) = prompts(33)
    seq = engine.sequence(prompt, 2, prompt_logprobs=2)
    got = [x for length in (1, 10, 21, 1) for x in engine.step([(seq, length)])[0].prompt_logprobs or []]
    want = want_logprobs(model, prompt)
    assert [x.token for x in got] == prompt[1:]
    for row, x in zip(want, got, strict=False):
        assert abs(x.logprob - row[x.token]) < 1e-4
        assert x.rank == 1 + int((row > row[x.token]).sum())
        assert x.top_ids == row.topk(2).indices.tolist()


def test_more_prompt_logprobs_than_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference("llama")
    (prompt,) = prompts(33)
    whole = Engine(model)
    seq = whole.sequence(prompt, 0, prompt_logprobs=1)
    want = whole.step([(seq, 33)])[0].prompt_logprobs
    monkeypatch.setattr("labkit.engine.runner.LOGPROB_ROWS", 5)
    other = Engine(model)
    got = other.step([(other.sequence(prompt, 0, prompt_logprobs=1), 33)])[0].prompt_logprobs
    assert want is not None and got is not None and len(got) == 32
    assert [x.token for x in got] == [x.token for x in want]
    assert all(abs(x.logprob - y.logprob) < 1e-5 for x, y in zip(got, want, strict=True))


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 5, "seed": 2},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "seed": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 1.0, "seed": 4, "logit_bias": {7: 3.0, 9: -100.0}, "min_tokens": 6, "stop_token_ids": [11, 12]},
    {"temperature": 0.9, "top_k": 3, "seed": 2**64 - 5, "repetition_penalty": 0.8},
]


def test_company_changes_nothing() -> None:
    """Every kind of request alone, then all of them in one batch in another order of slots: the same tokens."""
    model = reference("llama")
    texts = prompts(3, 20, 9, 33, 12, 5, 17)
    alone = []
    for prompt, params in zip(texts, MIXED, strict=True):
        engine = Engine(model)
        seq = engine.sequence(prompt, 1, **params)
        engine.step([(seq, len(prompt))])
        engine.finish([seq], 12)
        alone.append(seq.output_token_ids)
    engine = Engine(model, slots=7, num_blocks=120)
    seqs = [engine.sequence(p, 6 - i, **params) for i, (p, params) in enumerate(zip(texts, MIXED, strict=True))]
    for seq in seqs[3:]:
        engine.step([(seq, seq.num_prompt_tokens)])
    engine.step([*((seq, 1) for seq in seqs[3:]), *((seq, seq.num_prompt_tokens) for seq in seqs[:3])])
    engine.finish(seqs, 12)
    assert [seq.output_token_ids for seq in seqs] == alone


def test_a_slot_forgets_who_was_there() -> None:
    model = reference("llama")
    first, second = prompts(30, 14)
    clean = Engine(model)
    want = clean.sequence(second, 0)
    clean.step([(want, 14)])
    clean.finish([want], 8)
    engine = Engine(model)
    everything = {
        "logit_bias": {5: 9.0},
        "repetition_penalty": 2.0,
        "frequency_penalty": 2.0,
        "min_tokens": 9,
        "top_k": 1,
    }
    old = engine.sequence(first, 0, temperature=1.0, logprobs=5, **everything)
    engine.step([(old, 30)])
    engine.finish([old], 5)
    new = engine.sequence(second, 0)
    result = engine.step([(new, 14)])[0]
    assert result.logprobs is None
    engine.finish([new], 8)
    assert new.output_token_ids == want.output_token_ids


def test_preemption_starts_again_and_ends_alike() -> None:
    """Computed again from nothing, in a slot that another one used, with penalties whose counts must be rebuilt."""
    model = reference("llama")
    (prompt,) = prompts(19)
    params = {"temperature": 1.0, "seed": 9, "frequency_penalty": 1.5, "repetition_penalty": 1.4, "top_p": 0.9}
    engine = Engine(model)
    want = engine.sequence(prompt, 0, **params)
    engine.step([(want, 19)])
    engine.finish([want], 14)
    seq = engine.sequence(prompt, 1, **params)
    engine.step([(seq, 19)])
    engine.finish([seq], 6)
    seq.num_computed, seq.block_table, seq.token_on_device, seq.slot = 0, [], False, 0
    engine.step([(seq, 20)])
    engine.step([(seq, 5)])
    engine.finish([seq], 14)
    assert seq.output_token_ids == want.output_token_ids


def test_penalties_by_hand() -> None:
    """Presence and frequency count the output alone, repetition the prompt too; a negative logit is multiplied."""
    model = reference("llama")
    prompt = [7, 7, 7, 9]
    for params in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1.5}):
        engine = Engine(model)
        seq = engine.sequence(prompt, 0, logit_bias={7: 4.0}, **params)
        engine.step([(seq, 4)])
        engine.finish([seq], 12)
        logits = model(torch.tensor([prompt + seq.output_token_ids])).logits[0].detach()
        for i, token in enumerate(seq.output_token_ids):
            x = logits[3 + i].clone()
            x[7] += 4.0
            output = seq.output_token_ids[:i]
            for t in set(prompt + output):
                factor = seq.params.repetition_penalty
                x[t] = x[t] / factor if x[t] > 0 else x[t] * factor
            for t in set(output):
                x[t] -= seq.params.presence_penalty + seq.params.frequency_penalty * output.count(t)
            assert x[token] >= x.max() - 1e-4


def test_no_end_before_min_tokens() -> None:
    model = reference("llama")
    (prompt,) = prompts(6)
    engine = Engine(model)
    forced = {2: 100.0, 11: 90.0}
    seq = engine.sequence(prompt, 0, logit_bias=forced, min_tokens=4, stop_token_ids=[11])
    engine.step([(seq, 6)])
    engine.finish([seq], 5)
    assert not {2, 11} & set(seq.output_token_ids[:4])
    assert seq.output_token_ids[4] == 2


def test_results_come_in_the_order_of_the_step() -> None:
    """A decode behind a chunk of a prompt: the runner turns them round for itself, not for its caller."""
    model = reference("llama")
    engine = Engine(model)
    one, two = (engine.sequence(p, i) for i, p in enumerate(prompts(9, 20)))
    engine.step([(one, 9)])
    results = engine.step([(two, 12), (one, 1)])
    assert results[0].token is None and results[1].token == one.output_token_ids[1]


def test_kv_bytes() -> None:
    engine = Engine(reference("qwen3"), num_blocks=80)
    assert engine.runner.kv_bytes == 2 * 2 * 81 * BLOCK * 2 * 24 * 4
