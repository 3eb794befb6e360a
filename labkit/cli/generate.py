"""`labkit generate`: one prompt, one completion."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from typing import Annotated, Any

import typer

from labkit.cli.errors import note
from labkit.cli.groups import ENGINE_OF_ONE_REQUEST, MODEL, SAMPLING, Quiet, open_llm
from labkit.cli.options import options
from labkit.config import EngineConfig, SamplingParams
from labkit.errors import counted
from labkit.outputs import RequestOutput


@options(sampling=SAMPLING, engine=ENGINE_OF_ONE_REQUEST)
def generate(
    model: Annotated[str, MODEL],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to go on from.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole RequestOutput.")] = False,
    quiet: Quiet = False,
    *,
    sampling: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Print one completion as it is written.

    labkit generate toy --prompt 'Once upon a time' --max-tokens 64 --temperature 0.7 --seed 1
    """
    with open_llm(model, engine, quiet) as llm:
        start = time.monotonic()
        if as_json or sampling.n > 1:
            [output] = llm.generate([prompt], sampling, use_tqdm=False)
            print(json.dumps(to_json(output), ensure_ascii=False) if as_json else _numbered(output))
        else:
            output = _stream(llm.stream(prompt, sampling))
        seconds = time.monotonic() - start
    if not quiet:
        count = sum(len(answer.token_ids) for answer in output.outputs)
        note(f"{counted(count, 'token')} in {seconds:.2f} s, {count / seconds:.1f} tokens/s")


def _stream(outputs: Any) -> RequestOutput:
    """Print the text as it grows; returns the last output."""
    shown = 0
    output = None
    for output in outputs:
        text = output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    assert output is not None, "a stream ends with a finished output"
    print()
    return output


def _numbered(output: RequestOutput) -> str:
    return "\n".join(f"[{answer.index}] {answer.text}" for answer in output.outputs)


def to_json(value: Any) -> Any:
    """Dataclasses and named tuples as objects, keys as strings, a number that JSON lacks (-inf) as null."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return to_json(value._asdict())
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
