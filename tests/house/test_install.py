"""scripts/install.sh on machines that are not this one: a fake Python records what it was asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "sh dirname uname cat tr sed cksum rm tail tee awk date head mkdir cp chmod printf".split()

# Answers what install.sh asks of a Python. VERSION, and whether it has ensurepip and pip, are written in.
FAKE_PYTHON = """#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
printf '%s\\n' "$*" >>"@calls@"
case "$*" in
    *version_info*) echo @version@ ;;
    *"import ensurepip"*) exit @no_ensurepip@ ;;
    *"import torch"*) exit 1 ;;
    "-m pip --python "*) exit @no_pip@ ;;
    "-m venv "*)
        for last; do :; done
        mkdir -p "$last/bin" && cp "$0" "$last/bin/python" && echo "home = here" >"$last/pyvenv.cfg" ;;
    "-m pip install "*) echo "Downloading torch-9.9.whl (900.1 MB)"; echo "chatter"; exit @pip_status@ ;;
esac
"""


@dataclass
class Machine:
    """A checkout with nothing but the installer in it, and a PATH on which only the basic tools lie."""

    home: Path

    @property
    def checkout(self) -> Path:
        return self.home / "checkout"

    @property
    def bin(self) -> Path:
        return self.home / "bin"

    def add(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)

    def python(self, name: str, version: str, *, ensurepip: bool = True, pip: bool = True, pip_status: int = 0) -> None:
        script = FAKE_PYTHON.replace("@calls@", str(self.home / "calls")).replace("@version@", version)
        script = script.replace("@no_ensurepip@", str(int(not ensurepip))).replace("@no_pip@", str(int(not pip)))
        self.add(name, script.replace("@pip_status@", str(pip_status)))

    def calls(self) -> str:
        path = self.home / "calls"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def install(self, *extras: str, **env: str) -> subprocess.CompletedProcess[str]:
        (self.home / "calls").unlink(missing_ok=True)
        return subprocess.run(
            ["sh", str(self.checkout / "scripts" / "install.sh"), *extras],
            env={"PATH": str(self.bin), **env},
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.bin.mkdir()
    for tool in TOOLS:
        if path := shutil.which(tool):
            (made.bin / tool).symlink_to(path)
    made.add("uname", '#!/bin/sh\ncase "$1" in -m) echo x86_64 ;; *) echo Linux ;; esac\n')
    (made.checkout / "scripts").mkdir(parents=True)
    for name in ("scripts/install.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, made.checkout / name)
    return made


needs_no_gpu = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="the installer sees this machine's GPU")


def test_no_python_at_all(machine: Machine) -> None:
    done = machine.install("lab")
    assert done.returncode == 1
    assert "labkit: error: labkit needs Python 3.11 or newer; found here: none." in done.stderr


def test_only_an_old_python(machine: Machine) -> None:
    machine.python("python3", "3.9")
    machine.add("apt-get", "#!/bin/sh\n")
    done = machine.install("lab")
    assert done.returncode == 1
    assert "found here: python3 (3.9)" in done.stderr
    assert "sudo apt-get install python3 python3-venv" in done.stderr
    assert not (machine.checkout / ".venv").exists()


def test_on_a_mac_it_names_brew(machine: Machine) -> None:
    machine.python("python3", "3.9")
    machine.add("uname", "#!/bin/sh\necho Darwin\n")
    assert "brew install python@" in machine.install("lab").stderr


def test_a_second_python_is_found_when_the_first_is_old_or_broken(machine: Machine) -> None:
    machine.python("python3", "3.9")
    machine.add("python3.13", "#!/bin/sh\nexit 127\n")  # a pyenv shim for a version that is not active
    machine.python("python3.12", "3.12")
    done = machine.install("lab")
    assert done.returncode == 0, done.stderr
    assert "making .venv with python3.12 (Python 3.12)" in done.stdout


def test_a_version_that_ci_runs_goes_before_a_newer_one(machine: Machine) -> None:
    machine.python("python3", "3.14")
    machine.python("python3.11", "3.11")
    assert "with python3.11 (" in machine.install("lab").stdout


def test_a_newer_version_is_better_than_none(machine: Machine) -> None:
    machine.python("python3", "3.14")
    done = machine.install("lab")
    assert done.returncode == 0, done.stderr
    assert "-c constraints.txt" not in machine.calls()


def test_debian_without_its_venv_package(machine: Machine) -> None:
    machine.python("python3", "3.12", ensurepip=False, pip=False)
    machine.add("apt-get", "#!/bin/sh\n")
    done = machine.install("lab")
    assert done.returncode == 1
    assert "sudo apt-get install python3.12-venv" in done.stderr
    assert not (machine.checkout / ".venv").exists()


def test_no_ensurepip_but_a_pip_that_can_help(machine: Machine) -> None:
    machine.python("python3", "3.12", ensurepip=False)
    done = machine.install("lab")
    assert done.returncode == 0, done.stderr
    assert "took the system's pip for it" in done.stdout


@needs_no_gpu
def test_the_second_time_nothing_is_installed(machine: Machine) -> None:
    machine.python("python3", "3.12")
    first = machine.install("test", "lab")
    assert first.returncode == 0, first.stderr
    assert "--editable .[test,lab]" in machine.calls()
    assert "Downloading torch-9.9.whl (900.1 MB)" in first.stdout and "chatter" not in first.stdout
    for extras in (["lab"], ["test", "lab"]):
        again = machine.install(*extras)
        assert "everything is installed" in again.stdout
        assert "pip" not in machine.calls()


@needs_no_gpu
def test_an_extra_is_added_and_a_change_installs_anew(machine: Machine) -> None:
    machine.python("python3", "3.12")
    machine.install("lab")
    machine.install("test", "lab")
    assert "--editable .[test,lab]" in machine.calls()
    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    machine.install("lab")
    assert "--editable .[lab]" in machine.calls()


@needs_no_gpu
def test_pins_on_a_machine_like_ci_and_ranges_on_others(machine: Machine) -> None:
    machine.python("python3", "3.12")
    assert "Linux without an NVIDIA GPU, as in CI" in machine.install("lab").stdout
    assert "install --progress-bar off -c constraints.txt --editable" in machine.calls()

    machine.add("nvidia-smi", "#!/bin/sh\n")
    assert "an NVIDIA GPU is here" in machine.install("lab").stdout
    assert "constraints.txt" not in machine.calls()
    assert "(PINNED=1)" in machine.install("lab", PINNED="1").stdout

    machine.add("uname", "#!/bin/sh\necho Darwin\n")
    (machine.bin / "nvidia-smi").unlink()
    assert "(Darwin)" in machine.install("lab").stdout


def test_torch_from_an_index_of_ones_own(machine: Machine) -> None:
    machine.python("python3", "3.12")
    done = machine.install("lab", TORCH_INDEX="http://127.0.0.1:1/cpu")
    assert done.returncode == 0, done.stderr
    torch, rest = (line for line in machine.calls().splitlines() if "-m pip install" in line)
    assert torch.endswith("--index-url http://127.0.0.1:1/cpu torch>=2.9")
    assert "--index-url" not in rest


def test_pip_fails(machine: Machine) -> None:
    machine.python("python3", "3.12", pip_status=1)
    done = machine.install("lab")
    assert done.returncode == 1
    assert "pip could not install labkit" in done.stderr and "chatter" in done.stderr
    assert "pip could not" in machine.install("lab").stderr, "a failed install must not count as done"


def test_a_moved_checkout_gets_a_new_venv(machine: Machine) -> None:
    machine.python("python3", "3.12")
    machine.install("lab")
    moved = machine.home / "moved"
    machine.checkout.rename(moved)
    moved.rename(machine.checkout)
    assert "everything is installed" in machine.install("lab").stdout or os.path.exists("/dev/nvidiactl")
    (machine.checkout / ".venv" / ".labkit-root").write_text("/somewhere/else\n")
    assert "was moved" in machine.install("lab").stdout


def test_something_else_named_venv_is_not_removed(machine: Machine) -> None:
    machine.python("python3", "3.12")
    (machine.checkout / ".venv").mkdir()
    (machine.checkout / ".venv" / "mine").touch()
    done = machine.install("lab")
    assert done.returncode == 1 and ".venv exists and is no virtual environment" in done.stderr
    assert (machine.checkout / ".venv" / "mine").exists()
