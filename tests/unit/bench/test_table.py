from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from labkit.bench.record import read_record
from labkit.bench.table import markdown
from tests.unit.bench.samples import a_record

ROOT = Path(__file__).parents[3]


def test_the_table() -> None:
    assert markdown(a_record(), "data/recorded/cpu-offline-2026-11-30.json").splitlines() == [
        "| tiny, tok/s | labkit | transformers | llama.cpp | × transformers | × llama.cpp |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| decode1 (output) | 31.0 | 9.0 | – | 3.44 | – |",
        "| decode8 (output) | 122 | 61.0 | – | 2.00 | – |",
        "",
        "Median of 3 runs of each, float32, all engines in one process in turn. Test CPU, 2 threads, torch 2.9.0, "
        "2026-11-30, commit 0123456.",
        "llama.cpp: not measured: no module named llama_cpp.",
        "Eight streams give 3.9 times the tokens of one.",
        "A step at 8 streams takes 65.0 ms: 64.0 in the model, 1.00 around it (0.50 buffers and sampling, "
        "0.38 scheduler, 0.12 outputs).",
        "Loading adds 540 MiB of resident memory (at its peak 600); weights are 500 MiB, the KV cache 20.",
        "Raw: `data/recorded/cpu-offline-2026-11-30.json`.",
    ]


def test_a_changed_tree_is_told() -> None:
    record = a_record()
    dirty = msgspec.structs.replace(record, machine=msgspec.structs.replace(record.machine, tree_clean=False))
    assert "commit 0123456 with changes." in markdown(dirty, "x.json")


def test_without_peers_there_are_no_columns_for_them() -> None:
    record = a_record()
    rows = [row for row in record.summary if row.engine == "labkit"]
    alone = msgspec.structs.replace(record, summary=rows, peers={}, comparisons=[], step_cost=None, memory=None)
    assert markdown(alone, "x.json").splitlines()[:3] == [
        "| tiny, tok/s | labkit |",
        "| --- | ---: |",
        "| decode1 (output) | 31.0 |",
    ]


def test_the_readme_shows_what_the_record_says() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- measured: begin.*?-->\n(.*?)<!-- measured: end -->", text, re.DOTALL)
    assert block, "README.md has lost its `measured` marks"
    names = re.findall(r"Raw: `(data/recorded/.+?)`", block[1])
    if not names:
        assert not block[1].strip(), "figures in README.md that come from no record"
        pytest.skip("nothing is shown yet")
    tables = [markdown(read_record(ROOT / name), name) for name in names]
    assert block[1].strip() == "\n\n".join(tables)
