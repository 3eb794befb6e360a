"""`python -m labkit.lab.execute`: outputs are stored, without what only a living kernel could fill."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labkit.lab import execute

WIDGET = """
from labkit.lab.widgets.stepper import Frame, Stepper


def render(data, step):
    return Frame(f'<svg xmlns="http://www.w3.org/2000/svg">{step}</svg>', f"step {step}")


Stepper(render, None, ["a", "b"], "step")
"""


def make(folder: Path, *sources: str) -> Path:
    path = folder / "00_test.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source.strip()) for source in sources]), path)
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # main() sets these for its kernels; monkeypatch takes them back.
    for name, value in execute.environment("/nowhere").items():
        monkeypatch.setenv(name, value)


def test_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = "import sys; print('out'); print('err', file=sys.stderr); print('more')"
    path = make(tmp_path, noise, "import os; os.environ['CUDA_VISIBLE_DEVICES']", WIDGET)
    assert execute.main([str(tmp_path)]) == 0
    assert "00_test.ipynb" in capsys.readouterr().out
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first, second, third = notebook.cells
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, 3]
    assert [(o.name, o.text) for o in first.outputs] == [("stdout", "out\nmore\n")]
    assert second.outputs[0].data["text/plain"] == "''"
    [shown] = third.outputs
    assert set(shown.data) == {"text/plain", "text/html"}
    assert 'alt="step 0"' in shown.data["text/html"]
    assert "widgets" not in notebook.metadata
    assert "execution" not in first.metadata, "no times of day"


def test_a_cell_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path, "1 / 0")
    before = path.read_text()
    assert execute.main([str(path)]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert path.read_text() == before


def test_too_large(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "LARGEST", 1000)
    assert execute.main([str(make(tmp_path, "print('x' * 2000)"))]) == 1
    assert "at most 1,000 are stored" in capsys.readouterr().err


def test_nothing_to_run(tmp_path: Path) -> None:
    assert execute.main([str(tmp_path)]) == 1
