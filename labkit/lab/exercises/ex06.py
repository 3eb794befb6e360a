"""Lesson 06: attention without the N×N matrix?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from labkit.lab.exercises.exercise import Case, Exercise, Wrong, rounded
from labkit.lab.online import empty_state


def _some(*shape: int) -> Tensor:
    """Small numbers, the same every time, no two rows alike."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 37 % 101 / 25 - 2).reshape(shape)


def _sum_cases() -> Iterator[Case]:
    for text, pieces in (
        ("pieces = [[0, 0]]", [[0.0, 0.0]]),
        ("pieces = [[2, 1], [0]]", [[2.0, 1.0], [0.0]]),
        ("pieces = [[0, 1], [3, 2]]", [[0.0, 1.0], [3.0, 2.0]]),
        ("pieces = [[1], [4], [2], [9]]", [[1.0], [4.0], [2.0], [9.0]]),
        ("pieces = [[-300, -301], [-299]]", [[-300.0, -301.0], [-299.0]]),
        ("pieces = [[1000, 999], [1001, 1000]]", [[1000.0, 999.0], [1001.0, 1000.0]]),
    ):

        def run(fn: Callable[..., Any], pieces: list[list[float]] = pieces) -> Any:
            return rounded(fn([torch.tensor(piece) for piece in pieces]))

        yield Case(text, run)


SUM = Exercise(
    id="06.1",
    title="A softmax's sum, piece by piece",
    name="best_and_sum",
    difficulty="easy",
    stub='''
def best_and_sum(pieces):
    """(m, l) of all scores of all pieces: the largest score, and the sum of exp(score - m). One look at each piece.

    pieces: list of tensors [any length]; m and l are numbers or tensors without dimensions.
    """
    m, l = torch.tensor(-torch.inf), torch.tensor(0.0)
    for scores in pieces:
        ...  # about 3 lines
    return ...
''',
    hints=(
        "The new largest is `torch.maximum(m, scores.max())`. Do not overwrite m yet: you still need the old one.",
        "l was summed with the old m. exp(s - old) becomes exp(s - new) if it is multiplied by exp(old - new).",
        "`l = l * torch.exp(m - higher) + torch.exp(scores - higher).sum()`, and then `m = higher`.",
    ),
    solution="""
def best_and_sum(pieces):
    m, l = torch.tensor(-torch.inf), torch.tensor(0.0)
    for scores in pieces:
        higher = torch.maximum(m, scores.max())
        l = l * torch.exp(m - higher) + torch.exp(scores - higher).sum()
        m = higher
    return m, l
""",
    wrong=(
        Wrong(
            "no rescale",
            """
def best_and_sum(pieces):
    m, l = torch.tensor(-torch.inf), torch.tensor(0.0)
    for scores in pieces:
        m = torch.maximum(m, scores.max())
        l = l + torch.exp(scores - m).sum()
    return m, l
""",
            "right as long as the largest score is in the first piece. When m rises, what is in l was summed with "
            "the old m: multiply it by exp(old - new)",
        ),
        Wrong(
            "rescaled the wrong way",
            """
def best_and_sum(pieces):
    m, l = torch.tensor(-torch.inf), torch.tensor(0.0)
    for scores in pieces:
        higher = torch.maximum(m, scores.max())
        l = (l * torch.exp(higher - m) if l > 0 else l) + torch.exp(scores - higher).sum()
        m = higher
    return m, l
""",
            "you multiply by exp(new - old), which is larger than 1. A higher m makes old weights smaller: exp(old - "
            "new)",
        ),
        Wrong(
            "each piece its own maximum",
            """
def best_and_sum(pieces):
    m, l = torch.tensor(-torch.inf), torch.tensor(0.0)
    for scores in pieces:
        higher = scores.max()
        l = l * torch.exp(m - higher) + torch.exp(scores - higher).sum()
        m = higher
    return m, l
""",
            "m follows the piece at hand, also downwards. It is the largest score of all so far: "
            "torch.maximum(m, scores.max())",
        ),
        Wrong(
            "no maximum",
            """
def best_and_sum(pieces):
    m = torch.cat(pieces).max()
    return m, sum(torch.exp(scores).sum() for scores in pieces) * torch.exp(-m)
""",
            "exp(1000) is infinite in float32, and exp(-300) is 0. Take m off the scores *before* exp",
        ),
    ),
    cases=_sum_cases,
)


def _tile_cases() -> Iterator[Case]:
    q, k, v = _some(3, 4), _some(6, 4).flip(0), _some(6, 2)
    everything = torch.ones(3, 6, dtype=torch.bool)
    causal = everything.tril(3)
    first = empty_state(3, 2)
    shift = torch.tensor([2.0, 2.0, 2.0]), torch.tensor([1.0, 3.0, 2.0]), _some(3, 2)
    for text, state, tile, seen in (
        ("the first tile of one key", first, slice(0, 1), everything),
        ("the first tile of two keys", first, slice(0, 2), everything),
        ("all keys in one tile", first, slice(0, 6), everything),
        ("a tile after others, m = [2, 2, 2]", shift, slice(2, 4), everything),
        ("a tile of which query 0 sees nothing", shift, slice(4, 6), causal),
        ("a tile after others, scores 20 times as large", shift, slice(0, 6), causal),
    ):

        def run(
            fn: Callable[..., Any],
            state: tuple[Tensor, ...] = state,
            tile: slice = tile,
            seen: Tensor = seen,
            by: float = 20.0 if "20 times" in text else 1.0,
        ) -> Any:
            answer = fn(*(x.clone() for x in state), by * q, k[tile], v[tile], seen[:, tile])
            if not isinstance(answer, tuple):
                return answer
            return dict(zip(("m", "l", "o"), rounded(answer), strict=True))

        yield Case(text, run)


TILE = Exercise(
    id="06.2",
    title="Take a tile",
    name="take_tile",
    difficulty="medium",
    stub='''
def take_tile(m, l, o, q, k, v, seen):
    """What is known of T queries, with one more tile of n keys: (m, l, o).

    m [T]: the largest score so far. l [T]: the sum of exp(score - m). o [T, D]: the values, weighted with
    exp(score - m) and added up; not divided by l. q [T, D], k [n, D], v [n, D]; scores are q kᵀ / √D, and
    where seen [T, n] is False, -inf.
    """
    return ...  # about 6 lines
''',
    hints=(
        "Scores first: `(q @ k.T / q.shape[1] ** 0.5).masked_fill(~seen, -torch.inf)`, which is [T, n].",
        "Then as in 06.1, a row each: `higher = torch.maximum(m, scores.amax(dim=1))`, `shrink = torch.exp(m - "
        "higher)`, `weights = torch.exp(scores - higher[:, None])`.",
        "What shrinks l shrinks o as well: `o * shrink[:, None] + weights @ v`.",
    ),
    solution="""
def take_tile(m, l, o, q, k, v, seen):
    scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~seen, -torch.inf)
    higher = torch.maximum(m, scores.amax(dim=1))
    shrink = torch.exp(m - higher)
    weights = torch.exp(scores - higher[:, None])
    return higher, l * shrink + weights.sum(dim=1), o * shrink[:, None] + weights @ v
""",
    wrong=(
        Wrong(
            "o is not rescaled",
            """
def take_tile(m, l, o, q, k, v, seen):
    scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~seen, -torch.inf)
    higher = torch.maximum(m, scores.amax(dim=1))
    shrink = torch.exp(m - higher)
    weights = torch.exp(scores - higher[:, None])
    return higher, l * shrink + weights.sum(dim=1), o + weights @ v
""",
            "you rescale l and not o. The values in o were weighted with the old m, too: both shrink, or their "
            "quotient is no mean any more",
        ),
        Wrong(
            "nothing is rescaled",
            """
def take_tile(m, l, o, q, k, v, seen):
    scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~seen, -torch.inf)
    higher = torch.maximum(m, scores.amax(dim=1))
    weights = torch.exp(scores - higher[:, None])
    return higher, l + weights.sum(dim=1), o + weights @ v
""",
            "right for the first tile. After that, when a larger score comes, what was there before must be "
            "multiplied by exp(old - new), l and o both",
        ),
        Wrong(
            "no √D",
            """
def take_tile(m, l, o, q, k, v, seen):
    scores = (q @ k.T).masked_fill(~seen, -torch.inf)
    higher = torch.maximum(m, scores.amax(dim=1))
    shrink = torch.exp(m - higher)
    weights = torch.exp(scores - higher[:, None])
    return higher, l * shrink + weights.sum(dim=1), o * shrink[:, None] + weights @ v
""",
            "the scores lack / √D: D is q's width, 4 here, so yours are twice as large",
        ),
        Wrong(
            "the mask as a zero",
            """
def take_tile(m, l, o, q, k, v, seen):
    scores = (q @ k.T / q.shape[1] ** 0.5) * seen
    higher = torch.maximum(m, scores.amax(dim=1))
    shrink = torch.exp(m - higher)
    weights = torch.exp(scores - higher[:, None])
    return higher, l * shrink + weights.sum(dim=1), o * shrink[:, None] + weights @ v
""",
            "a hidden key has the score 0, and exp(0) is a weight like others. Hidden is -inf: exp(-inf) is 0",
        ),
        Wrong(
            "one maximum for all queries",
            """
def take_tile(m, l, o, q, k, v, seen):
    scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~seen, -torch.inf)
    higher = torch.maximum(m, scores.max())
    shrink = torch.exp(m - higher)
    weights = torch.exp(scores - higher[:, None])
    return higher, l * shrink + weights.sum(dim=1), o * shrink[:, None] + weights @ v
""",
            "all queries share one maximum. Each is a softmax of its own: amax over dim 1, the keys",
        ),
        Wrong(
            "divided at once",
            """
def take_tile(m, l, o, q, k, v, seen):
    scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~seen, -torch.inf)
    higher = torch.maximum(m, scores.amax(dim=1))
    shrink = torch.exp(m - higher)
    weights = torch.exp(scores - higher[:, None])
    total = l * shrink + weights.sum(dim=1)
    return higher, total, (o * shrink[:, None] + weights @ v) / total[:, None]
""",
            "you divide o by l at each tile. The next tile would divide again; o stays a sum until the last one",
        ),
    ),
    cases=_tile_cases,
)


def _attend_cases() -> Iterator[Case]:
    for text, rows, length, tile in (
        ("1 query, 1 key", 1, 1, 4),
        ("T = N = 4, one tile", 4, 4, 4),
        ("T = N = 4, tiles of 2", 4, 4, 2),
        ("T = N = 5, tiles of 2", 5, 5, 2),
        ("the last 1 of 6 tokens, tiles of 2", 1, 6, 2),
        ("the last 3 of 7 tokens, tiles of 3", 3, 7, 3),
    ):

        def run(fn: Callable[..., Any], rows: int = rows, length: int = length, tile: int = tile) -> Any:
            take_tile = TILE.define(TILE.solution)
            return rounded(fn(_some(rows, 2), _some(length, 2).flip(0), _some(length, 2), tile, take_tile))

        yield Case(text, run)


ATTEND = Exercise(
    id="06.3",
    title="Causal attention in tiles",
    name="attend",
    difficulty="hard",
    stub='''
def attend(q, k, v, tile, take_tile):
    """Each of the last T of N tokens attends to those before it and itself: [T, D].

    q [T, D]: query i is of token N - T + i. k, v [N, D]. Keys in tiles of `tile`, the last may be shorter.
    """
    (T, D), N = q.shape, k.shape[0]
    m, l, o = q.new_full((T,), -torch.inf), q.new_zeros(T), q.new_zeros(T, D)
    tokens = torch.arange(N, device=q.device)
    for begin in range(0, N, tile):
        ...  # about 3 lines
    return ...
''',
    hints=(
        "A slice may reach behind the end: `k[begin : begin + tile]` is the shorter last tile by itself.",
        "The keys' tokens are `tokens[begin : begin + tile]`, the queries' `tokens[N - T :]`. A query sees a key if "
        "key <= query: compare `keys[None, :]` with `queries[:, None]`.",
        "After the loop divide: `o / l[:, None]`.",
    ),
    solution="""
def attend(q, k, v, tile, take_tile):
    (T, D), N = q.shape, k.shape[0]
    m, l, o = q.new_full((T,), -torch.inf), q.new_zeros(T), q.new_zeros(T, D)
    tokens = torch.arange(N, device=q.device)
    for begin in range(0, N, tile):
        keys = tokens[begin : begin + tile]
        seen = keys[None, :] <= tokens[N - T :, None]
        m, l, o = take_tile(m, l, o, q, k[keys], v[keys], seen)
    return o / l[:, None]
""",
    wrong=(
        Wrong(
            "queries begin at 0",
            """
def attend(q, k, v, tile, take_tile):
    (T, D), N = q.shape, k.shape[0]
    m, l, o = q.new_full((T,), -torch.inf), q.new_zeros(T), q.new_zeros(T, D)
    tokens = torch.arange(N, device=q.device)
    for begin in range(0, N, tile):
        keys = tokens[begin : begin + tile]
        seen = keys[None, :] <= tokens[:T, None]
        m, l, o = take_tile(m, l, o, q, k[keys], v[keys], seen)
    return o / l[:, None]
""",
            "right for a whole prompt. Where T < N the queries are the *last* T tokens: query i is token N - T + i, "
            "and yours does not see what came before",
        ),
        Wrong(
            "not oneself",
            """
def attend(q, k, v, tile, take_tile):
    (T, D), N = q.shape, k.shape[0]
    m, l, o = q.new_full((T,), -torch.inf), q.new_zeros(T), q.new_zeros(T, D)
    tokens = torch.arange(N, device=q.device)
    for begin in range(0, N, tile):
        keys = tokens[begin : begin + tile]
        seen = keys[None, :] < tokens[N - T :, None]
        m, l, o = take_tile(m, l, o, q, k[keys], v[keys], seen)
    return o / l[:, None]
""",
            "a token sees itself, too: key <= query. With < the first token sees nothing at all, and 0 / 0 is nan",
        ),
        Wrong(
            "no mask",
            """
def attend(q, k, v, tile, take_tile):
    (T, D), N = q.shape, k.shape[0]
    m, l, o = q.new_full((T,), -torch.inf), q.new_zeros(T), q.new_zeros(T, D)
    tokens = torch.arange(N, device=q.device)
    for begin in range(0, N, tile):
        keys = tokens[begin : begin + tile]
        seen = torch.ones(T, len(keys), dtype=torch.bool, device=q.device)
        m, l, o = take_tile(m, l, o, q, k[keys], v[keys], seen)
    return o / l[:, None]
""",
            "every query sees every key. A token that sees its future would make the model's own answers useless: "
            "key <= query",
        ),
        Wrong(
            "the rest is left out",
            """
def attend(q, k, v, tile, take_tile):
    (T, D), N = q.shape, k.shape[0]
    m, l, o = q.new_full((T,), -torch.inf), q.new_zeros(T), q.new_zeros(T, D)
    tokens = torch.arange(N, device=q.device)
    for begin in range(0, max(N // tile, 1) * tile, tile):
        keys = tokens[begin : begin + tile]
        seen = keys[None, :] <= tokens[N - T :, None]
        m, l, o = take_tile(m, l, o, q, k[keys], v[keys], seen)
    return o / l[:, None]
""",
            "right where N is a multiple of the tile. Otherwise the last, shorter tile is missing, and in it are the "
            "newest tokens",
        ),
        Wrong(
            "not divided",
            """
def attend(q, k, v, tile, take_tile):
    (T, D), N = q.shape, k.shape[0]
    m, l, o = q.new_full((T,), -torch.inf), q.new_zeros(T), q.new_zeros(T, D)
    tokens = torch.arange(N, device=q.device)
    for begin in range(0, N, tile):
        keys = tokens[begin : begin + tile]
        seen = keys[None, :] <= tokens[N - T :, None]
        m, l, o = take_tile(m, l, o, q, k[keys], v[keys], seen)
    return o
""",
            "o is a weighted sum. Divided by the sum of its weights, l, it is the mean that attention wants",
        ),
    ),
    cases=_attend_cases,
)


def _bytes_cases() -> Iterator[Case]:
    for length, width, rows, number_bytes in ((4, 2, 4, 1), (4, 2, 2, 1), (8, 2, 2, 4), (2048, 64, 128, 2)):

        def run(fn: Callable[..., Any], case: tuple[int, ...] = (length, width, rows, number_bytes)) -> Any:
            return fn(*case)

        yield Case(f"attention_bytes(length={length}, width={width}, rows={rows}, number_bytes={number_bytes})", run)


BYTES = Exercise(
    id="06.4",
    title="Bytes of attention",
    name="attention_bytes",
    difficulty="medium",
    stub='''
def attention_bytes(length, width, rows, number_bytes):
    """(bytes of three operations, bytes of one) for one head: q, k, v and the result are [length, width].

    Three: scores = q kᵀ, weights = softmax(scores), weights × v; each reads its inputs and writes its result.
    One: programs of `rows` queries each; a program reads its queries, all keys and all values, and writes its
    rows of the result. length is a multiple of rows.
    """
    return ...  # about 3 lines
''',
    hints=(
        "A matrix [length, width] is `length * width * number_bytes` bytes, the scores `length * length * "
        "number_bytes`.",
        "Three operations: q kᵀ reads 2 small matrices and writes the large one, softmax reads and writes a large one, "
        "the last reads a large and a small one and writes a small one.",
        "One: there are `length // rows` programs, and each reads k and v anew. Queries and results are moved once.",
    ),
    solution="""
def attention_bytes(length, width, rows, number_bytes):
    small, large = length * width * number_bytes, length * length * number_bytes
    programs = length // rows
    return 4 * small + 4 * large, 2 * small + programs * 2 * small
""",
    wrong=(
        Wrong(
            "scores are moved once",
            """
def attention_bytes(length, width, rows, number_bytes):
    small, large = length * width * number_bytes, length * length * number_bytes
    return 4 * small + large, 2 * small + length // rows * 2 * small
""",
            "the large matrix makes four trips: scores are written and read, and so are the weights",
        ),
        Wrong(
            "keys are read once",
            """
def attention_bytes(length, width, rows, number_bytes):
    small, large = length * width * number_bytes, length * length * number_bytes
    return 4 * small + 4 * large, 4 * small
""",
            "every program reads all keys and values for itself: programs know nothing of each other. There are "
            "length / rows of them",
        ),
        Wrong(
            "numbers",
            """
def attention_bytes(length, width, rows, number_bytes):
    small, large = length * width, length * length
    return 4 * small + 4 * large, 2 * small + length // rows * 2 * small
""",
            "these are numbers, not bytes: a number takes number_bytes of them",
        ),
    ),
    cases=_bytes_cases,
)

EXERCISES = (SUM, TILE, ATTEND, BYTES)
