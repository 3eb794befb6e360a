"""A shipped model whose files are not the shipped ones is not opened, and the message says which file."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from labkit.errors import ModelError
from labkit.models import sources, toys
from labkit.models.checkpoint import open_checkpoint

DATA = Path(__file__).resolve().parents[3] / "data"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of toy-draft that is opened in its place."""
    folder = tmp_path / "toy-draft"
    shutil.copytree(DATA / "toy-draft", folder)
    monkeypatch.setattr(sources, "shipped", lambda name: tmp_path / Path(name).name)
    return folder


def expected(file: str) -> str:
    hashes: dict[str, dict[str, str]] = json.loads(toys.HASHES.read_text())
    return hashes["toy-draft"][file]


def test_whole_it_is_opened(copy: Path) -> None:
    assert open_checkpoint("toy-draft").path == copy


@pytest.mark.parametrize("file", toys.FILES)
def test_a_changed_file_is_named_with_both_hashes(copy: Path, file: str) -> None:
    changed = (copy / file).read_bytes() + b" "
    (copy / file).write_bytes(changed)
    with pytest.raises(ModelError) as caught:
        open_checkpoint("toy-draft")
    for word in (str(copy / file), expected(file), hashlib.sha256(changed).hexdigest(), "Install labkit again"):
        assert word in str(caught.value)


def test_all_missing_files_are_named_with_their_hash(copy: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (copy / file).unlink()
    with pytest.raises(ModelError) as caught:
        open_checkpoint("toy-draft")
    for file in ("config.json", "model.safetensors"):
        assert f"{copy / file} is missing; its SHA-256 should be {expected(file)}" in str(caught.value)
    assert "tokenizer.json" not in str(caught.value)


def test_a_folder_given_as_a_path_is_the_users_own(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"eos_token_id": [2]}')
    assert open_checkpoint(str(copy)).config.eos_token_ids == (2,)


def test_in_a_checkout_git_has_them(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    folder = tmp_path / "data" / "toy"
    assert f"`git checkout -- {folder}`" in toys.how_to_get_back("toy", folder)
