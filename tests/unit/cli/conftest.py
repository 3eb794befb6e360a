"""Fixtures of the command line's tests."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
from fake_llm import FakeLLM

from labkit.cli import main


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setitem(sys.modules, "labkit.llm", types.SimpleNamespace(LLM=FakeLLM))  # type: ignore[arg-type]
    monkeypatch.setattr(FakeLLM, "made", [])
    for name in ("LABKIT_DEVICE", "LABKIT_SEED"):
        monkeypatch.delenv(name, raising=False)
    return FakeLLM


@pytest.fixture
def labkit(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: (exit status, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(list(args))
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run
