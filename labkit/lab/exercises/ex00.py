"""Lesson 00: where does a token's time go on this box?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from labkit.lab.exercises.exercise import Case, Exercise, Wrong

VOCABULARY = 11


def scripted_model(ids: torch.Tensor) -> torch.Tensor:
    """A model whose favourite next token depends on every token before it: logits [1, T, V] for ids [1, T]."""
    places = torch.arange(1, ids.shape[1] + 1)
    favourite = (torch.cumsum(ids * places, dim=1) + 3 * places) % VOCABULARY
    return torch.nn.functional.one_hot(favourite, VOCABULARY).float()


def _generate_cases() -> Iterator[Case]:
    for prompt, count in (([5], 1), ([5, 2], 1), ([5, 2], 2), ([1, 7, 3], 5)):

        def run(fn: Callable[..., Any], prompt: list[int] = prompt, count: int = count) -> Any:
            mine = list(prompt)
            answer = fn(scripted_model, mine, count)
            return {"tokens": answer, "prompt afterwards": mine}

        yield Case(f"generate(model, {prompt}, {count})", run)


GENERATE = Exercise(
    id="00.1",
    title="The loop",
    name="generate",
    difficulty="easy",
    stub="""
def generate(model, prompt_ids, count):
    \"\"\"The `count` tokens that follow, as a list: always the token with the largest logit.

    model(torch.tensor([ids])) gives logits of shape [1, T, V] for T ids; it remembers nothing between calls.
    \"\"\"
    return ...  # about 5 lines
""",
    hints=(
        "Copy the prompt into a list of your own, and let that list grow by one id in each round.",
        "`logits[0, -1]` has V numbers: one for each token that could come after the last one.",
        "`int(logits[0, -1].argmax())` is the id to append. At the end return only what you appended.",
    ),
    solution="""
def generate(model, prompt_ids, count):
    ids = list(prompt_ids)
    for _ in range(count):
        logits = model(torch.tensor([ids]))
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt_ids):]
""",
    wrong=(
        Wrong(
            "first position",
            """
def generate(model, prompt_ids, count):
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, 0].argmax()))
    return ids[len(prompt_ids):]
""",
            "you choose from the first position's logits. They say what follows the first token; "
            "what follows the whole text is in the last position, logits[0, -1]",
        ),
        Wrong(
            "the text never grows",
            """
def generate(model, prompt_ids, count):
    new = []
    for _ in range(count):
        new.append(int(model(torch.tensor([prompt_ids]))[0, -1].argmax()))
    return new
""",
            "every round shows the model the same prompt, so it gives the same token. "
            "The token you chose has to be part of the next round's input",
        ),
        Wrong(
            "only the newest token",
            """
def generate(model, prompt_ids, count):
    ids, new = list(prompt_ids), []
    for _ in range(count):
        ids = [int(model(torch.tensor([ids]))[0, -1].argmax())]
        new += ids
    return new
""",
            "after the first round the model sees only the newest token. This model keeps nothing between calls "
            "(that will be the KV cache): give it the whole text each time",
        ),
        Wrong(
            "the prompt too",
            """
def generate(model, prompt_ids, count):
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids
""",
            "you return the prompt as well. Only the new tokens are asked for",
        ),
        Wrong(
            "the caller's list",
            """
def generate(model, prompt_ids, count):
    start = len(prompt_ids)
    for _ in range(count):
        prompt_ids.append(int(model(torch.tensor([prompt_ids]))[0, -1].argmax()))
    return prompt_ids[start:]
""",
            "the tokens are right, but you append to the caller's list: their prompt has grown. Work on a copy",
        ),
    ),
    cases=_generate_cases,
)


def _cost_cases() -> Iterator[Case]:
    for arguments in (
        {"parameters": 10, "number_bytes": 4, "kv_bytes": 2, "streams": 1, "new": 1, "context": 0},
        {"parameters": 10, "number_bytes": 4, "kv_bytes": 2, "streams": 1, "new": 3, "context": 0},
        {"parameters": 10, "number_bytes": 4, "kv_bytes": 2, "streams": 1, "new": 1, "context": 5},
        {"parameters": 10, "number_bytes": 4, "kv_bytes": 2, "streams": 2, "new": 1, "context": 0},
        {"parameters": 10, "number_bytes": 4, "kv_bytes": 2, "streams": 3, "new": 2, "context": 5},
    ):

        def run(fn: Callable[..., Any], arguments: dict[str, int] = arguments) -> Any:
            return fn(**arguments)

        yield Case(f"step_cost({', '.join(f'{name}={value}' for name, value in arguments.items())})", run)


COST = Exercise(
    id="00.2",
    title="Bytes and FLOPs of one step",
    name="step_cost",
    difficulty="medium",
    stub="""
def step_cost(parameters, number_bytes, kv_bytes, streams, new, context):
    \"\"\"(bytes read, FLOPs) of one forward pass over `streams` requests at once.

    Each request brings `new` tokens and has `context` tokens before them, whose keys and values
    take `kv_bytes` a token. A parameter takes `number_bytes`. Attention's own FLOPs are left out.
    \"\"\"
    return ...  # about 3 lines
""",
    hints=(
        "One pass reads every parameter once, whether it serves one request or eight.",
        "Keys and values belong to a request: each one reads its own context. Each *token* is multiplied with every "
        "parameter.",
        "One parameter and one token: one multiplication and one addition, so 2 FLOPs.",
    ),
    solution="""
def step_cost(parameters, number_bytes, kv_bytes, streams, new, context):
    bytes_read = parameters * number_bytes + streams * context * kv_bytes
    flops = 2 * parameters * streams * new
    return bytes_read, flops
""",
    wrong=(
        Wrong(
            "weights for each stream",
            """
def step_cost(parameters, number_bytes, kv_bytes, streams, new, context):
    return streams * (parameters * number_bytes + context * kv_bytes), 2 * parameters * streams * new
""",
            "you read the weights once for each stream. In one pass they are read once for all streams together; "
            "that is the whole reason to batch",
        ),
        Wrong(
            "weights for each token",
            """
def step_cost(parameters, number_bytes, kv_bytes, streams, new, context):
    return streams * new * parameters * number_bytes + streams * context * kv_bytes, 2 * parameters * streams * new
""",
            "you read the weights once for each token. A matrix that was read multiplies all tokens of the pass "
            "before the next one is read",
        ),
        Wrong(
            "one FLOP a parameter",
            """
def step_cost(parameters, number_bytes, kv_bytes, streams, new, context):
    return parameters * number_bytes + streams * context * kv_bytes, parameters * streams * new
""",
            "the FLOPs are half of what they should be: a parameter is multiplied *and* the product added",
        ),
        Wrong(
            "FLOPs of one token",
            """
def step_cost(parameters, number_bytes, kv_bytes, streams, new, context):
    return parameters * number_bytes + streams * context * kv_bytes, 2 * parameters * streams
""",
            "the FLOPs do not grow with `new`. Reading is shared by the tokens of a pass, arithmetic is not",
        ),
        Wrong(
            "no keys and values",
            """
def step_cost(parameters, number_bytes, kv_bytes, streams, new, context):
    return parameters * number_bytes, 2 * parameters * streams * new
""",
            "the keys and values of the context are missing: each request reads context × kv_bytes besides the weights",
        ),
        Wrong(
            "one context for all",
            """
def step_cost(parameters, number_bytes, kv_bytes, streams, new, context):
    return parameters * number_bytes + context * kv_bytes, 2 * parameters * streams * new
""",
            "the context is read once for all streams. Weights are shared, but keys and values are each request's own",
        ),
    ),
    cases=_cost_cases,
)


def _bound_cases() -> Iterator[Case]:
    for bytes_read, flops, bandwidth, peak in (
        (100, 100, 10, 100),  # 10 s of reading, 1 s of arithmetic
        (100, 2000, 10, 100),  # 10 s, 20 s
        (100, 500, 10, 100),  # 10 s, 5 s: more FLOPs than bytes, and memory is the limit
        (100, 50, 100, 10),  # 1 s, 5 s: fewer FLOPs than bytes, and arithmetic is the limit
    ):

        def run(fn: Callable[..., Any], case: tuple[int, ...] = (bytes_read, flops, bandwidth, peak)) -> Any:
            return fn(*case)

        yield Case(f"bound(bytes_read={bytes_read}, flops={flops}, bandwidth={bandwidth}, peak={peak})", run)


BOUND = Exercise(
    id="00.3",
    title="Which limit binds",
    name="bound",
    difficulty="easy",
    stub="""
def bound(bytes_read, flops, bandwidth, peak):
    \"\"\"(seconds, "memory" or "compute"): the least time a step can take, and what it waits for.

    `bandwidth` is in bytes a second, `peak` in FLOPs a second; reading and arithmetic overlap perfectly.
    \"\"\"
    return ...  # about 3 lines
""",
    hints=(
        "Work out two times: how long reading takes alone, and how long the arithmetic takes alone.",
        "They overlap, so the step is done when the slower of the two is done.",
        "The name of the slower one is the bound. No comparison of FLOPs with bytes is needed: they have other units.",
    ),
    solution="""
def bound(bytes_read, flops, bandwidth, peak):
    reading, arithmetic = bytes_read / bandwidth, flops / peak
    return max(reading, arithmetic), "memory" if reading > arithmetic else "compute"
""",
    wrong=(
        Wrong(
            "more FLOPs than bytes",
            """
def bound(bytes_read, flops, bandwidth, peak):
    return max(bytes_read / bandwidth, flops / peak), "compute" if flops > bytes_read else "memory"
""",
            "you call it compute as soon as there are more FLOPs than bytes. But this box does many FLOPs in the time "
            "it reads one byte: compare the two times",
        ),
        Wrong(
            "the sum",
            """
def bound(bytes_read, flops, bandwidth, peak):
    reading, arithmetic = bytes_read / bandwidth, flops / peak
    return reading + arithmetic, "memory" if reading > arithmetic else "compute"
""",
            "you add the two times. They overlap: while one matrix is multiplied the next one is on its way",
        ),
        Wrong(
            "the faster one",
            """
def bound(bytes_read, flops, bandwidth, peak):
    reading, arithmetic = bytes_read / bandwidth, flops / peak
    return min(reading, arithmetic), "memory" if reading < arithmetic else "compute"
""",
            "you took the faster of the two. A step is done when both are, so the slower one decides",
        ),
        Wrong(
            "names exchanged",
            """
def bound(bytes_read, flops, bandwidth, peak):
    reading, arithmetic = bytes_read / bandwidth, flops / peak
    return max(reading, arithmetic), "compute" if reading > arithmetic else "memory"
""",
            "the time is right, the name is the other one: if reading takes longer, the bound is memory",
        ),
    ),
    cases=_bound_cases,
)


def _pick_cases() -> Iterator[Case]:
    for rows in (
        [[1.0, 3.0, 2.0]],
        [[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]],
        [[2.0, 7.0, 7.0], [0.0, 0.0, 0.0], [-3.0, -2.0, -1.0]],
    ):

        def run(fn: Callable[..., Any], rows: list[list[float]] = rows) -> Any:
            return fn(torch.tensor(rows))

        yield Case(f"pick(torch.tensor({rows}))", run)


PICK = Exercise(
    id="00.4",
    title="Choose for everyone",
    name="pick",
    difficulty="easy",
    stub="""
def pick(logits):
    \"\"\"logits [S, V], a row for each stream: the id of the largest logit of each row, as a tensor [S].

    Of equal logits the lowest id counts.
    \"\"\"
    return ...  # 1 line
""",
    hints=(
        "`argmax` takes a dimension. Which of the two should disappear: streams or vocabulary?",
        "[S, V] becomes [S] when the last dimension goes.",
        "`logits.argmax(dim=-1)`; on a tie torch takes the first, which is the lowest id.",
    ),
    solution="""
def pick(logits):
    return logits.argmax(dim=-1)
""",
    wrong=(
        Wrong(
            "no dimension",
            """
def pick(logits):
    return logits.argmax()
""",
            "argmax without a dimension looks at the whole matrix as one long row and gives one number. "
            "One id for each row is needed",
        ),
        Wrong(
            "the other dimension",
            """
def pick(logits):
    return logits.argmax(dim=0)
""",
            "you choose, for each token, the stream that likes it best. Wanted is the other way round: "
            "for each stream the token",
        ),
        Wrong(
            "the value",
            """
def pick(logits):
    return logits.amax(dim=-1)
""",
            "these are the largest logits themselves. The engine needs to know *where* they stand: the ids",
        ),
        Wrong(
            "the last of equals",
            """
def pick(logits):
    return logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1)
""",
            "right, but on a tie you take the highest id. The engine's rule is the lowest, on every machine",
        ),
    ),
    cases=_pick_cases,
)

EXERCISES = (GENERATE, COST, BOUND, PICK)
