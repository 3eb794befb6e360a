"""`make lab` for real: started, looked at over HTTP, stopped with Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
# In .venv after `make test`: as a user does it. Elsewhere: with the Python that runs the tests, installing nothing.
RUN = [] if Path(sys.prefix) == VENV and (VENV / ".labkit-installed").exists() else [f"RUN={sys.executable}"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("jupyterlab")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Lab:
    """A running `make lab`."""

    def __init__(self, home: Path) -> None:
        # A home folder with another Jupyter in it, whose kernel has the same name and no working Python.
        for kernels in (home / ".local/share/jupyter/kernels", home / "Library/Jupyter/kernels", home / "path/kernels"):
            (kernels / "python3").mkdir(parents=True)
            spec = {"argv": ["/nowhere/python"], "display_name": "the wrong one", "language": "python"}
            (kernels / "python3" / "kernel.json").write_text(json.dumps(spec))
        self.port = free_port()
        env = os.environ | {"HOME": str(home), "JUPYTER_PATH": str(home / "path"), "PYTHONPATH": "/nowhere"}
        env.pop("JUPYTER_TOKEN", None)
        self.process = subprocess.Popen(
            ["make", "lab", f"PORT={self.port}", "BROWSER=0", *RUN],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell's background jobs ignore it, and so would everything that the tests start there.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.said = ""
        self.address = self.wait_for(r"ready: (http://\S+)", seconds=200)
        self.token = self.address.partition("token=")[2]

    def wait_for(self, pattern: str, seconds: float) -> str:
        assert self.process.stdout is not None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while time.monotonic() < until:
                if found := re.search(pattern, self.said):
                    return found[1]
                if selector.select(timeout=1):
                    piece = os.read(self.process.stdout.fileno(), 65536)
                    if not piece:
                        break
                    self.said += piece.decode()
        pytest.fail(f"make lab never said {pattern!r}; it said:\n{self.said}")

    def get(self, path: str, token: str | None = None) -> tuple[int, str]:
        headers = {"Authorization": f"token {token}"} if token else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)  # what Ctrl-C does
        self.process.communicate(timeout=60)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("home"))
    yield made
    made.kill()


def as_json(answer: tuple[int, str]) -> Any:
    status, body = answer
    assert status == 200
    return json.loads(body)


def test_the_printed_address_opens_jupyterlab(lab: Lab) -> None:
    with urllib.request.urlopen(lab.address, timeout=30) as page:
        assert page.status == 200
        assert "JupyterLab" in page.read().decode()


def test_it_opens_the_first_lesson(lab: Lab) -> None:
    assert "/lab/tree/00_where_does_the_time_go.ipynb?token=" in lab.address


def test_it_shows_the_lessons(lab: Lab) -> None:
    names = {entry["name"] for entry in as_json(lab.get("/api/contents", lab.token))["content"]}
    assert names >= {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_it_needs_the_token(lab: Lab) -> None:
    assert len(lab.token) >= 32
    assert lab.get("/api/contents")[0] == 403


def test_its_kernel_is_the_venvs_although_the_home_folder_has_another(lab: Lab) -> None:
    specs = as_json(lab.get("/api/kernelspecs", lab.token))
    assert specs["default"] == "python3"
    spec = specs["kernelspecs"]["python3"]["spec"]
    assert spec["display_name"] != "the wrong one"
    if not RUN:
        assert spec["argv"][0] == str(VENV / "bin" / "python")


def test_a_taken_port_is_named(lab: Lab) -> None:
    command = ["make", "lab", f"PORT={lab.port}", "BROWSER=0", *RUN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert f"labkit: error: port {lab.port} is taken" in done.stderr


def test_a_port_that_is_none() -> None:
    command = ["make", "lab", "PORT=seven", "BROWSER=0", *RUN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "labkit: error: PORT=seven: a port is a number from 1 to 65535." in done.stderr


def test_ctrl_c_stops_it_and_frees_the_port(lab: Lab) -> None:
    lab.stop()
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", lab.port)) != 0
