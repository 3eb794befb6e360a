"""Makes data/toy and data/toy-draft from nothing but this repository and smollm2-135m: `python data/make_toy.py all`.

Every stage keeps what it made in --work and is left out when that is there; a stage that is interrupted goes on where
it was. So a long run can be several short ones:

    python data/make_toy.py all --time-limit 580        # again and again, until it says that all is made

Needs a CUDA GPU (about fifteen minutes of one H200). `--smoke` runs everything tiny on a CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # toy_maker, and labkit in a checkout that is not installed

from toy_maker import card, documents, draft, evaluation, filtering, settings, stories, tokenizer, training  # noqa: E402

from labkit.errors import LabkitError  # noqa: E402
from labkit.kernels import backend  # noqa: E402

Stage = Callable[[settings.Settings], None]
STAGES: dict[str, Stage] = {
    "stories": stories.write_stories,
    "filter": filtering.filter_stories,
    "tokenizer": tokenizer.make_tokenizer,
    "tokenize": documents.tokenize,
    "target": training.train_target,
    "draft": draft.train_draft,
    "evaluate": evaluation.evaluate,
    "export": card.export_all,
}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
EXTRA: dict[str, Stage] = {"measure-cpu": card.measure_cpu}


@app.command()
def main(
    stage: Annotated[str, typer.Argument(help=f"all, or one of {', '.join([*STAGES, *EXTRA])}.")] = "all",
    work: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where the stages keep what they made: build/toy unless given."),
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Where the folders toy and toy-draft go.")] = HERE,
    time_limit: Annotated[float, typer.Option(help="Seconds after which this call ends, in order.")] = float("inf"),
    smoke: Annotated[bool, typer.Option("--smoke", help="Everything tiny, on a CPU; needs --out.")] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    teacher: Annotated[str, typer.Option(help="The model that writes the stories.")] = "smollm2-135m",
    story_seconds: Annotated[float, typer.Option(help="Most time for the stories.")] = 330,
    writers: Annotated[int, typer.Option(min=1, help="Processes that write stories, an engine each.")] = 4,
    target_seconds: Annotated[float, typer.Option(help="Time for the target's training.")] = 300,
    draft_seconds: Annotated[float, typer.Option(help="Time for the draft's training.")] = 100,
    commit: Annotated[str | None, typer.Option(help="Of this checkout, for the card, where git cannot tell.")] = None,
) -> None:
    """Run all stages, or one."""
    stages = STAGES if stage == "all" else {stage: (STAGES | EXTRA).get(stage)}
    if None in stages.values():
        raise typer.BadParameter(f"{stage} is no stage; they are all, {', '.join([*STAGES, *EXTRA])}")
    if smoke and out.resolve() == HERE:
        raise typer.BadParameter("--smoke makes models that are good for nothing; say with --out where they may go")
    work = work or HERE.parent / "build" / ("toy-smoke" if smoke else "toy")
    told = settings.Settings(
        work=work, out=out, device=device, teacher=teacher, story_seconds=story_seconds, writers=writers,
        target_seconds=target_seconds, draft_seconds=draft_seconds, commit=commit,
        deadline=time.monotonic() + time_limit,
    )  # fmt: skip
    told = settings.smoke(told) if smoke else told
    for name, run in stages.items():
        begun = time.monotonic()
        try:
            backend.resolve_device(told.device)
            settings.check_same_run(told)
            run(told)  # type: ignore[misc]
        except settings.OutOfTime:
            print(f"{name}: out of time; the same command goes on from here")
            raise typer.Exit(75) from None
        except (LabkitError, OSError, RuntimeError) as error:
            print(f"make_toy.py: error: {name}: {error}", file=sys.stderr)
            if isinstance(error, FileNotFoundError):
                print("A stage needs what those before it make: run `all`.", file=sys.stderr)
            raise typer.Exit(1) from error
        print(f"== {name}: {time.monotonic() - begun:.1f} s", flush=True)
    print("all is made" if stage == "all" else f"{stage} is made")


if __name__ == "__main__":
    app()
