"""Every lesson with the solutions in place: every check passes, and the lesson goes on with them.

Each lesson as it is stored is nbval's to run (`make test`); each wrong answer is in tests/unit/lab/test_exercises.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from labkit.lab.exercises import exercises_of

PATHS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def plain_text(cell: Any) -> str:
    return "\n".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_solved(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_LAB_FOLDER", str(tmp_path))
    number = path.name[:2]
    notebook = nbformat.read(path, as_version=4)
    cells = {cell.id: cell for cell in notebook.cells}
    exercises = exercises_of(number)
    for place, exercise in enumerate(exercises.values(), start=1):
        cells[f"{number}-exercise-{place}"].source = exercise.solution
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    for place, exercise in enumerate(exercises.values(), start=1):
        verdict = plain_text(cells[f"{number}-check-{place}"])
        assert verdict == f"✅ {exercise.id} {exercise.title}: right in every case"
    everything = "\n".join(plain_text(cell) for cell in notebook.cells if cell.cell_type == "code")
    assert "does not pass yet" not in everything
    assert f"{exercises.popitem()[0]}: with your function" in everything
    assert (tmp_path / "roofline.json").exists()
