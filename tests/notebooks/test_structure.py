"""Every lesson keeps to the template, as far as a script can see it. Nothing is run here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from labkit.lab import colab
from labkit.lab.execute import LARGEST, LIVE, is_fallback
from labkit.lab.exercises import exercises_of

PATHS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
CHECKED = "nbval-check-output"
# What the same cell prints on another machine, another day or in another place.
VARIES = re.compile(r"\d\s?(?:ms|GB/s|GFLOP/s|tokens/s|GiB)\b|0x[0-9a-f]{6,}|/(?:home|root|tmp|Users)/|\d{4}-\d\d-\d\d")
SETUP = 'from labkit.lab import setup\n\nlab = setup("{number}")'


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook: Any) -> str:
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)


def text_of(output: Any) -> str:
    return str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))


def test_there_are_lessons() -> None:
    assert PATHS


def test_format(path: Path, notebook: Any) -> None:
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert path.stat().st_size <= LARGEST
    number = path.name[:2]
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(rf"{number}-[a-z][a-z0-9-]*", id) for id in ids), ids


def test_length(notebook: Any) -> None:
    assert 35 <= len(notebook.cells) <= 60
    assert 1000 <= len(prose(notebook).split()) <= 1800
    assert len(re.findall(r"^- \[[^\]]+\]\(https?://", prose(notebook), flags=re.MULTILINE)) <= 5
    for cell in code_cells(notebook):
        assert len(cell.source.splitlines()) <= 25, cell.id


def test_parts(path: Path, notebook: Any) -> None:
    number = path.name[:2]
    cells = notebook.cells
    assert cells[0].source.startswith(f"# {number} · ")
    assert colab.BADGE.format(notebook=path.name) in cells[0].source
    assert re.search(r"\b\d\d minutes\b", cells[0].source)
    assert [cell.source for cell in cells[1:3]] == [colab.SETUP_CELL.strip(), SETUP.format(number=number)]
    code = "\n".join(cell.source for cell in code_cells(notebook))
    order = ["lab.predict(", "lab.check(", "lab.swap(", "play = "]
    places = [code.index(call) for call in order]
    assert places == sorted(places)
    for heading in ("## Play", "## Three lines to remember", "## If you want more"):
        assert heading in prose(notebook)
    assert "**Next, " in prose(notebook)
    assert "\nassert " in f"\n{cells[-1].source}"
    assert "was reached" in cells[-1].source


def test_exercises_are_the_package_s(path: Path, notebook: Any) -> None:
    number = path.name[:2]
    cells = {cell.id: cell for cell in notebook.cells}
    exercises = exercises_of(number)
    assert exercises
    for place, exercise in enumerate(exercises.values(), start=1):
        assert cells[f"{number}-exercise-{place}"].source == exercise.stub.strip()
        assert cells[f"{number}-hints-{place}"].source == exercise.hints_markdown()
        check = cells[f"{number}-check-{place}"]
        assert check.source == f'lab.check("{exercise.id}", {exercise.name})'
        assert CHECKED in check.metadata.get("tags", [])


def test_no_magics(notebook: Any) -> None:
    for cell in code_cells(notebook):
        assert not re.search(r"^\s*[%!?]|\?\s*$|get_ipython", cell.source, flags=re.MULTILINE), cell.id
        compile(cell.source, cell.id, "exec")


def test_outputs_are_stored(notebook: Any) -> None:
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run `make notebooks`"
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error", cell.id
            assert output.get("name") != "stderr", cell.id
            assert LIVE not in output.get("data", {}), cell.id
            assert not is_fallback(output), cell.id
    assert "was reached" in text_of(notebook.cells[-1].outputs[0])


def test_checked_outputs_are_the_same_everywhere(notebook: Any) -> None:
    checked = [cell for cell in code_cells(notebook) if CHECKED in cell.metadata.get("tags", [])]
    assert len(checked) >= 3
    for cell in checked:
        assert cell.outputs, cell.id
        for output in cell.outputs:
            assert not VARIES.search(text_of(output)), (cell.id, text_of(output))


def test_pictures_have_words(notebook: Any) -> None:
    pages = [o.data["text/html"] for c in code_cells(notebook) for o in c.outputs if "text/html" in o.get("data", {})]
    images = [image for page in pages for image in re.findall(r"<img [^>]*>", page)]
    assert len(images) >= 2
    assert all(re.search(r'alt="[^"]{20,}"', image) for image in images)
    for cell in code_cells(notebook):
        assert not any("image/png" in output.get("data", {}) for output in cell.outputs), f"{cell.id}: use lab.show"
