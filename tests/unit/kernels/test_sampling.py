"""Sampling: the noise, the filters against their definition, and the draw's distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.kernels import sampling

WORD = 2**32


def hash_word(x: int, key: int = 0) -> int:
    """lowbias32 in plain integers, with a key in its middle."""
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15 ^ key
    x = x * 0x846CA68B % WORD
    return x ^ x >> 16


def plain_noise(seed: int, choice: int, position: int, token: int) -> float:
    """The same number without a tensor."""
    low, high = seed % WORD, seed >> 32
    first = hash_word((hash_word(low ^ 0x243F6A88) + high) % WORD)
    second = hash_word((hash_word(high ^ 0x13198A2E) + low) % WORD)
    where = hash_word(hash_word((position * 0x9E3779B9 + choice) % WORD) ^ 0x03707344)
    k0, k1 = hash_word((first + where) % WORD), hash_word(second ^ where)
    x = hash_word((token * 0x9E3779B9 + k0) % WORD, k1)
    return -math.log(-math.log(1 - ((x >> 9) + 0.5) * 2.0**-23))


def signed(x: int) -> int:
    return x - WORD if x >= WORD // 2 else x


def keys_of(seeds: list[int], choices: list[int], positions: list[int]) -> Tensor:
    words = [[signed(seed % WORD), signed(seed >> 32)] for seed in seeds]
    make = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    return sampling.noise_keys(make(words), make(choices), make(positions))


def uniforms(keys: Tensor, tokens: int) -> Tensor:
    """The uniform numbers behind the noise, [S, tokens] float64."""
    noise = sampling.gumbel_noise(keys, torch.arange(tokens, dtype=torch.int32).unsqueeze(0))
    return (-(-noise.double()).exp()).exp()


def test_noise_is_the_same_in_plain_integers() -> None:
    cases = [(0, 0, 0), (1, 0, 5), (2**64 - 1, 3, 4096), (0xDEADBEEF12345678, 127, 131071), (2**31, 1, 77)]
    tokens = [0, 1, 2, 49151, 151935, 2**31 - 1]
    keys = keys_of(*(list(column) for column in zip(*cases, strict=True)))
    got = sampling.gumbel_noise(keys, torch.tensor([tokens], dtype=torch.int32))
    want = torch.tensor([[plain_noise(*case, token) for token in tokens] for case in cases])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_noise_is_finite_at_both_ends() -> None:
    for bits in (0, 2**23 - 1):
        u = torch.tensor(bits).float().add(0.5).mul(2.0**-23)
        assert 0 < u < 1
        assert float(u) == (bits + 0.5) * 2.0**-23
        assert (-(-u.log()).log()).isfinite()


@pytest.mark.parametrize("vary", ["seed low", "seed high", "choice", "position", "token"])
def test_noise_is_uniform_and_independent(vary: str) -> None:
    """Along every input: a chi-square over 64 bins, and no correlation between neighbours, near or far."""
    n = 40_000
    count = list(range(n))
    zero = [0] * n
    if vary == "token":
        u = uniforms(keys_of([9], [0], [40]), n)[0]
    else:
        seeds = {"seed low": count, "seed high": [i << 32 for i in count]}.get(vary, [5] * n)
        choices = count if vary == "choice" else zero
        positions = count if vary == "position" else zero
        u = uniforms(keys_of(seeds, choices, positions), 300)[:, 299]
    assert_uniform(torch.histc(u, bins=64, min=0, max=1))
    centred = (u - 0.5) * math.sqrt(12)
    for lag in (1, 2, 3, 16, 64, 1000):
        correlation = float((centred[lag:] * centred[:-lag]).mean())
        assert abs(correlation) < 5 / math.sqrt(n), f"neighbours {lag} apart: {correlation}"
        assert_uniform(torch.histc((u[lag:] * 8).floor() * 8 + (u[:-lag] * 8).floor(), bins=64, min=0, max=64))
    # All 23 bits: as often 0 as 1, and no two of them go together.
    bits = (u * 2**23).long().unsqueeze(1) >> torch.arange(23) & 1
    signs = 2 * bits.double() - 1
    assert signs.mean(0).abs().max() < 5 / math.sqrt(n)
    assert (signs.T @ signs / n - torch.eye(23)).abs().max() < 5 / math.sqrt(n)


def assert_uniform(histogram: Tensor) -> None:
    """A chi-square that chance would exceed once in some million times."""
    expected, freedom = float(histogram.sum()) / len(histogram), len(histogram) - 1
    assert float(((histogram - expected) ** 2).sum()) / expected < freedom + 5.5 * math.sqrt(2 * freedom)


def test_the_largest_noise_is_anywhere_and_as_large_as_it_should_be() -> None:
    """Of flat logits every token wins as often; and the largest of C Gumbels m has uniform exp(-C exp(-m))."""
    n, count = 20_000, 256
    keys = keys_of(list(range(n)), [0] * n, [3] * n)
    largest, winners = sampling.gumbel_noise(keys, torch.arange(count, dtype=torch.int32).unsqueeze(0)).max(-1)
    assert_uniform(torch.bincount(winners, minlength=count).double())
    assert_uniform(torch.histc((-count * (-largest.double()).exp()).exp(), bins=64, min=0, max=1))


def test_one_bit_of_the_seed_changes_everything() -> None:
    """Neither uniform numbers nor Gumbel noise go together if seeds, choices or positions are one bit apart."""
    cases = [(77, 1, 1000)]
    cases += [(77 ^ 1 << bit, 1, 1000) for bit in range(64)]
    cases += [(77, 1 ^ 1 << bit, 1000) for bit in range(7)] + [(77, 1, 1000 ^ 1 << bit) for bit in range(17)]
    u = uniforms(keys_of(*(list(column) for column in zip(*cases, strict=True))), 20_000)
    for values in (u, -(-u.log()).log()):
        correlations = torch.corrcoef(values) - torch.eye(len(cases))
        assert correlations.abs().max() < 5.5 / math.sqrt(20_000)


def test_rows_of_noise_are_independent() -> None:
    """Whole vocabularies of neighbouring seeds, choices and positions, and of swapped words and numbers."""
    cases = [(s, c, p) for s in (0, 1, 2, 1 << 32, 2 << 32) for c in (0, 1, 2) for p in (0, 1, 2, 30)]
    u = uniforms(keys_of(*(list(column) for column in zip(*cases, strict=True))), 20_000)
    correlations = torch.corrcoef(u) - torch.eye(len(cases))
    assert correlations.abs().max() < 5.5 / math.sqrt(20_000)
    # Nor is one row another one moved by a few tokens.
    for shift in (1, 2, 7):
        moved = torch.corrcoef(torch.cat((u[:, shift:], u[:, :-shift])))
        cross = moved[: len(cases), len(cases) :]
        assert cross.abs().max() < 5.5 / math.sqrt(20_000)


def filtered(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Probabilities [V] by the definition, in float64 and one row at a time."""
    p = (logits.double() / temperature).softmax(-1)
    keep = p >= min_p * p.max()
    order = p.argsort(descending=True, stable=True)
    if top_k > 0:
        keep[order[top_k:]] = False
    p = torch.where(keep, p, 0)
    p /= p.sum()
    if top_p < 1:
        before = p[order].cumsum(0) - p[order]
        p[order[before >= top_p]] = 0
    return p / p.sum()


def column(value: float, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((rows,), value, dtype=dtype)


def draw(logits: Tensor, keys: Tensor, temperature: float = 1.0, **filters: float) -> Tensor:
    rows = len(keys)
    kinds = {"top_k": torch.int32}
    tensors: Any = {name: column(value, rows, kinds.get(name, torch.float32)) for name, value in filters.items()}
    return sampling.sample(logits.expand(rows, -1), column(temperature, rows), keys, **tensors)


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.12},
    {"top_k": 5, "top_p": 0.8},
    {"temperature": 1.9, "top_p": 0.75, "min_p": 0.05},
]


@pytest.mark.parametrize("kw", FILTERS, ids=str)
def test_draws_have_the_distribution_of_the_definition(kw: dict[str, Any]) -> None:
    n = 20_000
    logits = torch.randn(11, generator=torch.Generator().manual_seed(1)) * 1.3
    want = filtered(logits, **kw)
    got = torch.bincount(draw(logits, keys_of(list(range(n)), [0] * n, [7] * n), **kw), minlength=11)
    assert not got[want == 0].any(), "a token that was cut is drawn"
    expected = want[want > 0] * n
    chi_square = float(((got[want > 0] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * max(freedom, 1)) + 1e-9


@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
@pytest.mark.parametrize("kw", [{"top_k": 40}, {"top_k": 1500}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 2000}], ids=str)
def test_a_large_vocabulary_is_cut_at_the_same_place(spread: float, kw: dict[str, Any]) -> None:
    """Flat rows need the whole vocabulary sorted, steep ones a few candidates; what is kept is the same."""
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2)) * spread
    want = torch.stack([filtered(row, **kw) for row in logits])
    top_k = column(kw.get("top_k", 0), 2, torch.int32)
    top_p = column(kw.get("top_p", 1.0), 2)
    for count in (sampling.CANDIDATES, 5000):
        values, ids, complete = sampling.candidates(logits, count, None, top_k, top_p)
        kept = torch.zeros(2, 5000, dtype=torch.bool).scatter_(1, ids, values > -torch.inf)
        assert complete.all() or count < 5000
        # Sums of float32 may put the line one token further.
        assert ((kept != (want > 0)).sum(-1) <= 1)[complete].all()
        assert ((want > 0).sum(-1) > count)[~complete].all() or kw.get("top_k", 0) > count


def test_candidates_do_not_depend_on_company() -> None:
    """A steep row beside a flat one, which makes both sort the whole vocabulary."""
    generator = torch.Generator().manual_seed(3)
    steep, flat = torch.randn(1, 5000, generator=generator) * 8, torch.randn(1, 5000, generator=generator) * 0.1
    both = torch.cat((steep, flat))
    for position in range(50):
        keys = keys_of([1, 2], [0, 0], [position] * 2)
        alone = draw(steep, keys[:1], top_p=0.9)
        assert draw_rows(both, keys, top_p=0.9)[0] == alone[0]


def draw_rows(logits: Tensor, keys: Tensor, top_p: float) -> Tensor:
    return sampling.sample(logits, column(1.0, len(keys)), keys, top_p=column(top_p, len(keys)))


@pytest.mark.parametrize("vocab", [53, 4000])
@pytest.mark.parametrize("kw", [{}, {"top_k": 1}, {"top_k": 4, "top_p": 0.2}, {"min_p": 0.5}], ids=str)
def test_greedy_takes_the_lowest_of_equals(vocab: int, kw: dict[str, Any]) -> None:
    logits = torch.zeros(vocab)
    logits[[17, 29, 46]] = 5.0
    keys = keys_of([1, 2, 3], [0, 0, 0], [4, 5, 6])
    assert draw(logits, keys, temperature=0.0, **kw).tolist() == [17] * 3
    assert sampling.greedy(logits.expand(3, -1)).tolist() == [17] * 3


def test_top_k_prefers_low_ids_among_equals() -> None:
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, 1.0]]).repeat(1, 500)
    values, ids = sampling.best_first(logits, 4)
    assert ids.tolist() == [[1, 3, 5, 7]]
    _, ids = sampling.best_first(-logits, 3)
    assert ids.tolist() == [[0, 2, 4]], "-0.0 equals 0.0"
    assert values.tolist() == [[1.0] * 4]


def test_best_first_breaks_ties_inside_and_at_the_edge() -> None:
    """Rounded logits have many equals; the reference is one stable sort of everything."""
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(6)).mul(10).round().div(10)
    want = torch.sort(logits, dim=-1, descending=True, stable=True)
    for count in (1, 2, 5, 37, 300, 699, 700):
        values, ids = sampling.best_first(logits, count)
        assert torch.equal(values, want.values[:, :count]) and torch.equal(ids, want.indices[:, :count])


def test_best_first_orders_negative_numbers_and_infinities() -> None:
    logits = torch.tensor([[-3.0, -torch.inf, 2.0, -1.0, 0.5, -torch.inf, -2.0]])
    values, ids = sampling.best_first(logits, 6)
    assert ids.tolist() == [[2, 4, 3, 6, 0, 1]]
    assert values.tolist() == [[2.0, 0.5, -1.0, -2.0, -3.0, -torch.inf]]


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 3.0]])
    seen = torch.tensor([[True, True, True, False, False]])
    counts = torch.tensor([[0, 0, 3, 0, 0]], dtype=torch.int32)
    one = lambda value: torch.tensor([value])  # noqa: E731
    got = sampling.apply_penalties(logits, seen, counts, one(2.0), one(0.25), one(0.5))
    assert got.tolist() == [[1.0, -4.0, 0.5 - 0.25 - 1.5, -1.0, 3.0]]
    assert logits.tolist() == [[2.0, -2.0, 1.0, -1.0, 3.0]]


def test_log_probabilities() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4)) * 4
    tokens = torch.tensor([3, 49, 0])
    own, rank, ids, values = sampling.log_probabilities(logits, tokens, 5)
    want = logits.double().log_softmax(-1)
    for row, token in enumerate(tokens.tolist()):
        assert own[row].item() == pytest.approx(want[row, token].item(), abs=1e-5)
        assert rank[row] == sorted(want[row].tolist(), reverse=True).index(want[row, token].item()) + 1
    torch.testing.assert_close(values.double(), want.topk(5).values, atol=1e-5, rtol=0)
    assert ids.tolist() == want.topk(5).indices.tolist()
    assert sampling.log_probabilities(logits, tokens, 0)[2].shape == (3, 0)
