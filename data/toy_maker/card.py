"""What goes into data/: the models, their cards, pictures and transcripts, and the hashes that labkit checks."""

from __future__ import annotations

import hashlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

from labkit.models import toys
from toy_maker.evaluation import measure_cpu_speed
from toy_maker.files import atomically, read_json, write_json, write_text
from toy_maker.filtering import write_sample
from toy_maker.settings import Settings

TEMPLATES = Path(__file__).parent
NAMES = {"target": "toy", "draft": "toy-draft"}


def draw_curve(curve: list[dict[str, float]], path: Path) -> None:
    """Loss against steps, of training windows and of held-out chats."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot([p["step"] for p in curve], [p["loss"] for p in curve], color="#0072B2", lw=0.8, label="training")
    held_out = [p for p in curve if "held_out" in p]
    axes.plot(
        [p["step"] for p in held_out], [p["held_out"] for p in held_out], "o--", color="#D55E00", label="held out"
    )
    axes.set(xlabel="step", ylabel="loss (nats a token)", ylim=(0, min(7, max(p["loss"] for p in curve))))
    axes.grid(alpha=0.3)
    axes.legend()
    atomically(path, lambda part: figure.savefig(part, format="png", dpi=90))
    pyplot.close(figure)


def write_cards(out: Path) -> None:
    """README.md of both folders, from toy/measured.json and each config.json."""
    measured = read_json(out / "toy" / "measured.json")
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    for template, name in (("toy.md.j2", "toy"), ("draft.md.j2", "toy-draft")):
        config = read_json(out / name / "config.json")
        text = environment.get_template(template).render(measured, config=config)
        write_text(out / name / "README.md", text)


def write_hashes(settings: Settings) -> None:
    """SHA-256 of what labkit reads: into the package, if the models go where the package finds them."""
    hashes: dict[str, dict[str, str]] = {}
    for name in NAMES.values():
        files = [*toys.FILES, *(["held_out.jsonl"] if name == "toy" else [])]
        hashes[name] = {
            file: hashlib.sha256((settings.out / name / file).read_bytes()).hexdigest() for file in sorted(files)
        }
    shipped = settings.out.resolve() == TEMPLATES.parent
    write_json(toys.HASHES if shipped else settings.out / toys.HASHES.name, hashes)


def _write_transcripts(transcripts: list[dict[str, Any]], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for number, one in enumerate(transcripts, start=1):
        text = f"labkit chat toy --temperature 0.8 --seed {one['seed']}\n\n> {one['prompt']}\n{one['text'].strip()}\n"
        write_text(folder / f"{number:02}.txt", text)


def export_all(settings: Settings) -> None:
    """The stage: the folders toy and toy-draft, whole."""
    measured = read_json(settings.work / "measured.json")
    for stage, name in NAMES.items():
        folder = settings.out / name
        for file in toys.FILES:
            source = settings.folder(stage) / "model" / file
            atomically(folder / file, partial(shutil.copyfile, source))
        draw_curve(measured[stage]["curve"], folder / "loss.png")
    toy = settings.out / "toy"
    write_sample(settings, toy)
    _write_transcripts(measured["transcripts"], toy / "transcripts")
    write_json(toy / "measured.json", measured)
    write_cards(settings.out)
    write_hashes(settings)
    sizes = {
        name: sum(path.stat().st_size for path in (settings.out / name).rglob("*") if path.is_file())
        for name in NAMES.values()
    }
    print(f"written to {settings.out}: {', '.join(f'{name} {size / 1e6:.2f} MB' for name, size in sizes.items())}")


def measure_cpu(settings: Settings) -> None:
    """The extra stage: one stream on this machine's CPU, added to the measurements beside the models, and the cards."""
    path = settings.out / "toy" / "measured.json"
    measured = read_json(path)
    rate = measure_cpu_speed(settings, settings.out / "toy")
    measured["speed"] = [one for one in measured["speed"] if one["gpu"]] + [rate]
    write_json(path, measured)
    write_cards(settings.out)
    print(rate)
