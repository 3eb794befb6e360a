"""Norms, SiLU, linears and sampling in Triton's interpreter, against PyTorch's definitions, on small odd shapes."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from labkit.kernels import (
    activation,
    cut,
    draw,
    draw_flat,
    filters,
    gumbel,
    invariant_linear,
    linear,
    norm_linear,
    rms_norm,
    sampling,
)
from labkit.kernels.jit import interpreted, jit, tl, triton

from .draws import Wishes, changed, defined, parameters

pytestmark = [
    pytest.mark.skipif(triton is None or not interpreted(), reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:.*:RuntimeWarning"),  # NumPy's, of integers that wrap around and of log 0
]
DTYPES = [torch.float32, torch.float16]
ROWS, WIDTHS = [0, 1, 3], [1, 17, 576, 1000]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def strided(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width] whose rows are not one after the other."""
    return torch.randn(rows, width + 5).to(dtype)[:, 2 : width + 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_pointwise(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = strided(rows, width, dtype), torch.randn(width).to(dtype)
    torch.testing.assert_close(rms_norm.rms_norm_triton(x, weight, 1e-5), rms_norm.rms_norm(x, weight, 1e-5))

    residual, ours = (strided(rows, width, dtype).copy_(torch.ones(width, dtype=dtype)) for _ in range(2))
    want, _ = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
    got, same = rms_norm.add_rms_norm_triton(x, ours, weight, 1e-5)
    torch.testing.assert_close(got, want)
    assert same is ours and torch.equal(ours, residual)

    gate_up = strided(rows, 2 * width, dtype)
    kept = gate_up.clone()
    torch.testing.assert_close(activation.silu_mul_triton(gate_up), activation.silu_mul(kept.clone()))
    assert torch.equal(gate_up, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "outputs"), [(0, 5, 3), (1, 100, 33), (65, 70, 130), (3, 64, 1)])
def test_invariant_linear(rows: int, width: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = strided(rows, width, dtype), strided(outputs, width, dtype)
    for bias in (None, torch.randn(outputs).to(dtype)):
        got = invariant_linear.invariant_linear(x, weight, bias)
        torch.testing.assert_close(
            got, functional.linear(x, weight, bias), atol=2e-2 if dtype != torch.float32 else 1e-4, rtol=1e-3
        )


def test_norm_of_every_head() -> None:
    heads = torch.randn(3, 7, 20).split((4, 3), dim=1)[1]  # as keys lie in QKV
    weight = torch.randn(20)
    torch.testing.assert_close(rms_norm.rms_norm_triton(heads, weight, 1e-5), rms_norm.rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8])
@pytest.mark.parametrize(("outputs", "width"), [(1, 1), (29, 17), (5, 576), (7, 1000)])
def test_linear(outputs: int, width: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = strided(rows, width, dtype), (torch.randn(outputs, width) / math.sqrt(width)).to(dtype)
    added = torch.randn(outputs).to(dtype) if bias else None
    want = x.double() @ weight.double().T + (0 if added is None else added.double())
    got = (linear.gemv if rows else linear.linear)(x, weight, added)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("outputs", "width"), [(1, 1), (29, 17), (5, 576), (3, 4096)])
def test_norm_linear(outputs: int, width: int, rows: int, gated: bool, dtype: torch.dtype) -> None:
    x, residual, norm = strided(rows, width, dtype), strided(rows, width, dtype), torch.randn(width).to(dtype)
    weight = (torch.randn(outputs * (2 if gated else 1), width) / math.sqrt(width)).to(dtype)
    bias = None if gated else torch.randn(outputs).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for block_output in (x, None):
        kept = residual.clone()
        got, stream = norm_linear.norm_linear_triton(block_output, residual, norm, 1e-5, weight, bias, gated)
        want, want_stream = norm_linear.norm_linear(block_output, kept, norm, 1e-5, weight, bias, gated)
        assert got.dtype == dtype and torch.equal(stream, want_stream)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("outputs", "width", "rows"), [(29, 17, 3), (1, 576, 16), (5, 1100, 8)])
def test_few_rows(outputs: int, width: int, rows: int) -> None:
    x, weight = strided(rows, width, torch.float16), (torch.randn(outputs, width) / math.sqrt(width)).half()
    added = torch.randn(outputs).half()
    for bias in (None, added):
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(linear.few_rows(x, weight, bias).double(), want, rtol=2e-3, atol=2e-3)


def test_linear_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "WHOLE_ROW", 1024)
    x, weight = torch.randn(3, 2500), torch.randn(6, 2500)
    torch.testing.assert_close(linear.gemv(x, weight), x @ weight.T, rtol=1e-4, atol=1e-3)


# --------------------------------------------------------------------------- sampling

TEMPERATURES, TOP_P, MIN_P, TOP_K = (0.0, 0.3, 1.0, 2.0), (1.0, 0.9, 0.5, 0.05), (0.0, 0.1, 0.5), (0, 1, 2, 5, 50, 400)


def wishes(rows: int, filtered: bool, penalties: bool = False) -> list[Wishes]:
    """Any combination of everything."""
    random = np.random.default_rng(rows)
    out = []
    for index in range(rows):
        pick = lambda values: values[random.integers(len(values))]  # noqa: E731
        filters = dict(top_p=pick(TOP_P), min_p=pick(MIN_P), top_k=int(pick(TOP_K))) if filtered else {}
        seed = int(random.integers(2**64, dtype=np.uint64))
        row = Wishes(float(pick(TEMPERATURES)), seed=seed, choice=index % 3, **filters)  # type: ignore[arg-type]
        if penalties and index % 2:
            row = Wishes(row.temperature, row.top_p, row.min_p, 1.7, 0.5, -0.3, row.top_k, row.choice, seed)
        out.append(row)
    return out


def logits_of(rows: int, vocab: int, kind: str) -> Tensor:
    spread = {"flat": 0.1, "peaked": 6.0}.get(kind, 1.0)
    logits = torch.randn(rows, vocab + 3)[:, 1 : vocab + 1] * spread
    return (logits * 2).round() / 2 if kind == "ties" else logits


@jit
def _noise_bits_kernel(table, positions, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    k0, k1 = gumbel.row_keys(table + row * 10, tl.load(positions + row))
    ids = tl.arange(0, COUNT)
    tl.store(out + row * COUNT + ids, gumbel.noise_bits(k0, k1, ids).to(tl.int32, bitcast=True))


def test_noise_is_the_same_bit_for_bit() -> None:
    rows = [
        Wishes(seed=seed, choice=choice) for seed in (0, 1, 2**31, 2**64 - 1, 0xDEADBEEF12345678) for choice in (0, 7)
    ]
    table = parameters(rows)
    positions = torch.tensor([0, 1, 5, 131071, 2**31 - 1] * 2, dtype=torch.int32)
    got = torch.empty(len(rows), 64, dtype=torch.int32)
    _noise_bits_kernel[(len(rows),)](table, positions, got, COUNT=64)
    keys = sampling.noise_keys(table[:, 8:], table[:, 7], positions)
    x = torch.arange(64, dtype=torch.int32).unsqueeze(0) * sampling.GOLDEN + keys[:, :1]
    assert torch.equal(got, sampling.mix(x, keys[:, 1:]))


@jit
def _bound_kernel(bits, exact, bound, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    word = tl.load(bits + place).to(tl.uint32, bitcast=True)
    tl.store(exact + place, gumbel.noise(word))
    tl.store(bound + place, -0.6931471805599453 * gumbel.log2_bound(word, False))


def test_the_bound_of_the_noise_holds() -> None:
    ends = torch.tensor([0, 1, 511, 512, -1, -512, -513, 2**31 - 1, -(2**31)], dtype=torch.int32)
    bits = torch.cat((ends, torch.randint(-(2**31), 2**31, (4096 - len(ends),)).int()))
    exact, bound = torch.empty(4096), torch.empty(4096)
    _bound_kernel[(1,)](bits, exact, bound, COUNT=4096)
    assert exact.isfinite().all()
    assert (bound >= exact - 1e-4).all()
    large = exact > 8
    assert (bound - exact)[large].max() < 1e-3  # close where it matters


@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "ties"])
@pytest.mark.parametrize("vocab", [11, 347, 1000])
@pytest.mark.parametrize("filtered", [False, True])
def test_draws_are_those_of_the_definition(
    vocab: int, kind: str, filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small pieces, so that a small row has several of each.
    monkeypatch.setattr(draw, "TILE", 256)
    monkeypatch.setattr(draw, "GROUP_TILE", 512)
    rows = 4
    table = parameters(wishes(rows, filtered))
    slots, positions = torch.randperm(rows).int(), torch.randint(0, 9999, (rows,)).int()
    logits = logits_of(rows, vocab, kind)
    tokens, own = draw.draw(logits, table, slots, positions, filtered=filtered, logprobs=True)
    assert tokens.tolist() == defined(logits, table, slots, positions).tolist()
    torch.testing.assert_close(own, logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1))


def test_many_equal_logits_go_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "GROUP_TILE", 128)
    filters = [dict(top_k=3), dict(top_p=0.3), dict(top_k=100, top_p=0.5), dict(min_p=1.0, top_p=0.01), dict()]
    rows = [Wishes(seed=seed, **each) for each in filters for seed in (1, 2)]  # type: ignore[arg-type]
    rows.append(Wishes(temperature=0.0, top_k=5))
    table, slots = parameters(rows), torch.arange(len(rows), dtype=torch.int32)
    logits = torch.zeros(len(rows), 347)
    logits[:, 100:] = -0.0
    tokens, _ = draw.draw(logits, table, slots, slots)
    assert tokens.tolist() == defined(logits, table, slots, slots).tolist()
    assert tokens[-1] == 0
    assert (tokens[:2] < 3).all()


def test_more_tokens_reach_the_cut_than_a_tile_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "GROUP_TILE", 32)
    table, slots = parameters([Wishes(top_k=40, top_p=0.95, seed=2)]), torch.zeros(1, dtype=torch.int32)
    logits = logits_of(1, 2001, "normal")
    tokens, _ = draw.draw(logits, table, slots, slots)
    assert tokens.tolist() == defined(logits, table, slots, slots).tolist()


@pytest.mark.parametrize(
    ("spread", "asked", "most"),
    [
        (3.0, dict(temperature=0.6, top_p=0.9), 2),  # what is kept fits the list, most of it its group's largest
        (3.0, dict(temperature=0.6, top_p=0.97), 2),  # the largest of all groups together are too light
        (1.0, dict(top_p=0.9), 10),  # two thirds of the row are kept
        (0.02, dict(top_p=0.5), 12),
        (0.0, dict(top_p=0.5), 20),
        (1.0, dict(top_k=5000, top_p=0.9), 13),
        (1.0, dict(min_p=0.01, top_p=0.9), 10),
    ],
)
def test_flat_rows_are_read_a_few_times(
    spread: float, asked: dict[str, float], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of 16 bits, many of them equal."""
    vocab, begins = 20_000, []

    def counted(row, begin, GROUP, TILE):  # type: ignore[no-untyped-def]
        begins.append(begin)
        return candidates(row, begin, GROUP, TILE)

    candidates = cut.candidates
    for module in (cut, filters, draw_flat):
        monkeypatch.setattr(module, "candidates", counted)
    table, slots = parameters([Wishes(seed=3, **asked)]), torch.zeros(1, dtype=torch.int32)  # type: ignore[arg-type]
    torch.manual_seed(8)
    logits = (spread * torch.randn(1, vocab)).bfloat16().float()
    tokens, _ = draw.draw(logits, table, slots, slots)
    assert tokens.tolist() == defined(logits, table, slots, slots).tolist()
    assert len(begins) <= most * math.ceil(vocab / draw.GROUP_TILE)


def test_more_tokens_are_equal_than_the_list_has_room_for() -> None:
    """top_k cuts among them, and top_p above them."""
    rows = [Wishes(top_k=400, top_p=top_p, seed=seed) for top_p in (0.3, 0.9, 0.97) for seed in range(3)]
    table, slots = parameters(rows), torch.arange(len(rows), dtype=torch.int32)
    logits = torch.zeros(len(rows), 20_000)
    logits[:, torch.randperm(20_000)[:300]] = 3 * torch.rand(300)
    tokens, _ = draw.draw(logits, table, slots, slots)
    assert tokens.tolist() == defined(logits, table, slots, slots).tolist()


def test_only_flat_rows_are_left_to_the_third_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [dict(top_k=50), dict(top_k=50, top_p=0.9), dict(top_k=100, min_p=0.05), dict(top_p=0.7), dict(min_p=0.1)]
    long = [dict(top_k=400), dict(top_p=0.999), dict(min_p=1e-3)]  # more than the 256 that are compared each with each
    flat = [dict(top_k=5000), dict(min_p=1e-9)]
    table = parameters([Wishes(seed=4, **asked) for asked in usual + long + flat])  # type: ignore[arg-type]
    slots = torch.arange(len(table), dtype=torch.int32)
    logits = (3 * torch.randn(len(table), 20_000)).bfloat16().float()
    want = defined(logits, table, slots, slots).tolist()
    assert draw.draw(logits, table, slots, slots)[0].tolist() == want
    monkeypatch.setattr(draw, "flat_kernel", defaultdict(lambda: lambda *args, **options: None))
    left = draw.draw(logits, table, slots, slots)[0].tolist()
    assert left == want[: len(usual)] + [-1] * len(long + flat)


def test_more_tokens_are_kept_than_the_list_has_room_for() -> None:
    """A gap in the values, where one pivot of the whole row leaves just the k best."""
    rows = [Wishes(top_k=5000, seed=1), Wishes(top_k=5000, top_p=0.9, seed=2)]
    table, slots = parameters(rows), torch.arange(2, dtype=torch.int32)
    logits = torch.rand(2, 20_000)
    logits[:, torch.randperm(20_000)[:5000]] += 9
    tokens, _ = draw.draw(logits, table, slots, slots)
    assert tokens.tolist() == defined(logits, table, slots, slots).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e4])
def test_the_best_in_any_chunk(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal logits far apart, so that several chunks come close or are equal; and logits that are -inf."""
    monkeypatch.setattr(draw, "TILE", 64)
    rows = 12
    table = parameters([Wishes(temperature, seed=seed) for seed in range(rows)])
    slots = torch.arange(rows, dtype=torch.int32)
    logits = torch.full((rows, 331), -math.inf)
    for row in range(rows):
        logits[row, torch.randperm(331)[: 1 + 20 * row]] = 7.0
    logits[-1] = 7.0
    tokens, _ = draw.draw(logits, table, slots, slots, filtered=False)
    assert tokens.tolist() == defined(logits, table, slots, slots).tolist()


def test_changes_come_first_and_draws_are_entered() -> None:
    rows, vocab = 6, 347
    table, slots, positions = (
        parameters(wishes(rows, True, penalties=True)),
        torch.randperm(rows).int(),
        torch.arange(rows),
    )
    logits = logits_of(rows, vocab, "normal").half()
    counts = torch.randint(-2, 3, (rows, vocab)).clamp(min=0).int()
    seen = (counts > 0) | (torch.rand(rows, vocab) < 0.2)
    values = torch.tensor([3.0, -math.inf, 2.0, 5.0, 1.0, -100.0])
    entries = torch.tensor([[0, 0, 1, 1, 4, 5], [7, 9, 346, 346, 0, 100]], dtype=torch.int32)
    adjustments = torch.cat((entries, values.view(torch.int32).unsqueeze(0)))
    want_logits = changed(logits, table, slots, adjustments, seen, counts)
    before = logits.clone(), seen.clone(), counts.clone()

    tokens, own = draw.draw(
        logits, table, slots, positions, logprobs=True, changes=draw.Changes(adjustments, seen, counts)
    )
    assert tokens.tolist() == defined(want_logits, table, slots, positions).tolist()
    raw = before[0].float().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(own, raw)
    assert torch.equal(logits, before[0])
    penalised = table[slots.long(), 3].view(torch.float32) != 1
    assert penalised.any() and not penalised.all()
    where = slots.long()[penalised], tokens[penalised]
    assert torch.equal(
        counts, before[2].index_put(where, torch.ones(len(where[0]), dtype=torch.int32), accumulate=True)
    )
    assert torch.equal(seen, before[1].index_put(where, torch.ones(len(where[0]), dtype=torch.bool)))


def test_nothing_to_draw_and_nothing_allowed() -> None:
    table = parameters([Wishes(), Wishes(0.0), Wishes(top_k=2), Wishes(top_p=0.5)])
    none = torch.empty(0, dtype=torch.int32)
    assert draw.draw(torch.empty(0, 11), table, none, none)[0].shape == (0,)
    slots = torch.arange(4, dtype=torch.int32)
    logits = torch.full((4, 40), -math.inf)
    tokens, _ = draw.draw(logits, table, slots, slots)
    assert ((tokens >= 0) & (tokens < 40)).all()  # whatever it is, it is a token
