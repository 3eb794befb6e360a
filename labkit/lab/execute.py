"""`python -m labkit.lab.execute notebooks`: run every notebook and store its outputs, so that a page without a kernel
shows them. On a CPU, with fixed seeds; the learner's own measurements play no part.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat

from labkit.lab.widgets.stepper import FALLBACK_CLASS

LARGEST = 500_000  # bytes of a notebook with its outputs
LIVE = "application/vnd.jupyter.widget-view+json"
CELL_SECONDS = 120


def find(paths: list[Path]) -> list[Path]:
    """The notebooks named, and those in the folders named, in the order of the lessons."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("*.ipynb")) if path.is_dir() else [path]
    return found


def strip_live(notebook: Any) -> None:
    """Drop what only a running kernel could fill; the static picture beside it stays."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(LIVE, None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not is_fallback(output)]


def is_fallback(output: Any) -> bool:
    """The hidden picture that stands in for a live widget; without a live one it has nothing to do."""
    return FALLBACK_CLASS in output.get("data", {}).get("text/html", "")


def settle(notebook: Any) -> None:
    """Metadata that does not depend on who ran it, and streams in one piece."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def execute(path: Path) -> None:
    """Run one notebook in a fresh kernel and write it back.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell raises.
        ValueError: if the result is too large to be stored.
    """
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        store_widget_state=False,
        extra_arguments=["--IPKernelApp.log_level=40"],
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    strip_live(notebook)
    settle(notebook)
    text = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > LARGEST:
        raise ValueError(f"{path.name} would be {len(text.encode()):,} bytes; at most {LARGEST:,} are stored")
    path.write_text(text, encoding="utf-8")


def environment(folder: str) -> dict[str, str]:
    """What the kernels run under: no GPU, and a roofline of their own."""
    return {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0", "LABKIT_LAB_FOLDER": folder, "MPLBACKEND": "agg"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m labkit.lab.execute", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="notebooks, or folders of them")
    notebooks = find(parser.parse_args(arguments).paths)
    if not notebooks:
        print("labkit: error: there is no notebook in what was named", file=sys.stderr)
        return 1
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment(folder))
        for path in notebooks:
            start = time.monotonic()
            try:
                execute(path)
            except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError, ValueError) as error:
                print(f"labkit: error: {path}: {error}", file=sys.stderr)
                failed += 1
            else:
                print(f"{path}: {time.monotonic() - start:.0f} s, {path.stat().st_size:,} bytes", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
