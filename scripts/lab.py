"""Starts JupyterLab on notebooks/ and prints its address once it answers. `make lab` calls this with .venv's Python.

PORT     the port; without one, the first free one from 8888 up
BROWSER  0 to open no browser
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
STATE = Path(sys.prefix) / "jupyter"


def say(text: str) -> None:
    print(f"labkit: {text}", flush=True)


def fail(text: str, status: int = 1) -> int:
    print(f"labkit: error: {text}", file=sys.stderr, flush=True)
    return status


def is_free(port: int) -> bool:
    with socket.socket() as s:
        # As the server itself does, so that a port left in TIME_WAIT by the last run counts as free.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def choose_port(asked: str) -> int:
    if not asked:
        return next(port for port in range(8888, 8988) if is_free(port))
    if not asked.isdecimal() or not 1 <= int(asked) <= 65535:
        raise ValueError(f"PORT={asked}: a port is a number from 1 to 65535.")
    if not is_free(int(asked)):
        raise ValueError(f"port {asked} is taken. Choose another: make lab PORT={int(asked) % 65535 + 1}")
    return int(asked)


def environment(token: str) -> dict[str, str]:
    """The caller's environment, less what would pull in another Jupyter's kernels, settings or packages."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "BROWSER", "JUPYTER_PATH")}
    env |= {
        "PYTHONNOUSERSITE": "1",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_CONFIG_DIR": str(STATE / "config"),
        "JUPYTER_DATA_DIR": str(STATE / "data"),
        "JUPYTER_RUNTIME_DIR": str(STATE / "runtime"),
        "IPYTHONDIR": str(STATE / "ipython"),
        # Here and not on the command line, where every user of the machine could read it.
        "JUPYTER_TOKEN": token,
        # A terminal or a `!command` in a lesson finds .venv's programs.
        "PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}",
        "VIRTUAL_ENV": sys.prefix,
    }
    return env


def answers(url: str, token: str) -> bool:
    request = urllib.request.Request(f"{url}/api/status", headers={"Authorization": f"token {token}"})
    # No proxy: a company's proxy does not know this machine's 127.0.0.1.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def can_show_a_browser() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def main() -> int:
    try:
        port = choose_port(os.environ.get("PORT", ""))
    except ValueError as error:
        return fail(str(error), status=2)
    except StopIteration:
        return fail("no free port from 8888 to 8987. Name one: make lab PORT=9000")
    if not NOTEBOOKS.is_dir():
        return fail(f"there is no folder {NOTEBOOKS}.")

    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    url = f"http://127.0.0.1:{port}"
    say("starting JupyterLab on notebooks/")
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--log-level=WARN"),
            f"--ServerApp.root_dir={NOTEBOOKS}",
            *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
            "--ServerApp.allow_root=True",  # a container or a rented GPU box often has no other user
            "--ServerApp.answer_yes=True",  # one Ctrl-C stops it, without a question
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ],
        env=environment(token),
        cwd=NOTEBOOKS,
        stdin=subprocess.DEVNULL,
    )
    # Ctrl-C reaches the server too, which stops its kernels first; a plain kill does not, so pass it on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())

    began = time.monotonic()
    while server.poll() is None and not answers(url, token):
        if time.monotonic() - began > 180:
            server.terminate()
            server.wait()
            return fail("JupyterLab did not answer within three minutes.")
        time.sleep(0.2)
    if server.poll() is not None:
        return fail(f"JupyterLab ended at once, with status {server.returncode}; what it said is above.")

    lessons = sorted(path.name for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    address = f"{url}/lab{f'/tree/{lessons[0]}' if lessons else ''}?token={token}"
    say(f"JupyterLab is ready: {address}")
    wants_browser = os.environ.get("BROWSER", "1") != "0"
    if wants_browser and can_show_a_browser():
        webbrowser.open(address)
    elif os.environ.get("SSH_CONNECTION"):
        say(f"from your own machine: ssh -L {port}:127.0.0.1:{port} this-machine, then open the address above there")
    say("Ctrl-C stops it")
    status = server.wait()
    say("JupyterLab has stopped")
    return 0 if status in (0, -signal.SIGTERM, -signal.SIGINT) else 1


if __name__ == "__main__":
    sys.exit(main())
