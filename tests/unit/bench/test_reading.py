from __future__ import annotations

import re
from pathlib import Path

import pytest

from labkit.bench.reading import markdown, read_record, tables, write_block
from labkit.bench.record import write_json
from labkit.errors import LabkitError
from tests.unit.bench.samples import a_kernel_record, a_profile, a_record

ROOT = Path(__file__).parents[3]
RECORDED = sorted((ROOT / "data/recorded").glob("*.json"))
SHOWN = re.compile(r"<!-- measured: begin.*?-->\n(.*?)<!-- measured: end -->", re.DOTALL)


@pytest.mark.parametrize("make", [a_record, a_kernel_record, a_profile])
def test_a_file_is_read_as_what_it_is(make, tmp_path: Path) -> None:
    write_json(make(), tmp_path / "r.json")
    assert read_record(tmp_path / "r.json") == make()


@pytest.mark.parametrize(
    "content", ["{}", "no json", '{"schema": 1, "kind": "offline"}', '{"kind": "kernels"}', '{"kind": "cake"}']
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(LabkitError, match=r"x\.json is not a record"):
        read_record(tmp_path / "x.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabkitError, match=r"cannot read .*x\.json: No such file"):
        read_record(tmp_path / "x.json")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_every_recorded_file_can_be_read(path: Path) -> None:
    assert f"Raw: `{path.as_posix()}`" in markdown(path)


def test_a_block_is_written_between_the_marks_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "p.md"
    page.write_text("above\n<!-- measured: begin. By hand: no. -->\nold\n<!-- measured: end -->\nbelow\n")
    for _ in range(2):
        write_block(page, "| a\\b |\n\nmore")
        assert page.read_text() == (
            "above\n<!-- measured: begin. By hand: no. -->\n| a\\b |\n\nmore\n<!-- measured: end -->\nbelow\n"
        )


@pytest.mark.parametrize("text", ["no marks\n", "<!-- measured: begin -->\n<!-- measured: end -->\n" * 2])
def test_a_page_must_have_one_block(tmp_path: Path, text: str) -> None:
    page = tmp_path / "p.md"
    page.write_text(text)
    with pytest.raises(LabkitError, match=r"p\.md must have one block"):
        write_block(page, "x")
    assert page.read_text() == text


@pytest.mark.parametrize("name", ["README.md", "docs/measured.md"])
def test_a_page_shows_what_the_records_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    block = SHOWN.search(Path(name).read_text(encoding="utf-8"))
    assert block, f"{name} has lost its `measured` marks"
    files = [Path(found) for found in re.findall(r"Raw: `(data/recorded/.+?)`", block[1])]
    assert files, f"{name} shows nothing"
    assert block[1] == tables(files) + "\n"


def test_all_that_is_recorded_is_on_the_page() -> None:
    shown = set(re.findall(r"Raw: `(.+?)`", (ROOT / "docs/measured.md").read_text(encoding="utf-8")))
    assert shown == {path.relative_to(ROOT).as_posix() for path in RECORDED}
