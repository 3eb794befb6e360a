"""The few pages of a model hub's HTTP API that a download needs, served from a folder on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Repositories are folders `root/OWNER/NAME`. `requests` lists what was asked for; `gated` names are refused.

    A file named in `broken` is cut off in the middle of its first download.
    """

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.requests: list[str] = []
        self.gated: set[str] = set()
        self.broken: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve(root: Path) -> Iterator[FakeHub]:
    hub = FakeHub(root)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        owner, name = parts[2:4] if parts[:2] == ["api", "models"] else parts[:2]
        repo = self.server.root / owner / name
        if f"{owner}/{name}" in self.server.gated:
            self.error(403, "GatedRepo")
        elif not repo.is_dir():
            self.error(404, "RepoNotFound")
        elif parts[:2] == ["api", "models"]:
            self.api(repo, f"{owner}/{name}", parts[4:])
        else:
            self.file(repo / "/".join(parts[4:]))

    def api(self, repo: Path, repo_id: str, rest: list[str]) -> None:
        files = sorted(path for path in repo.rglob("*") if path.is_file())
        if rest[:1] == ["tree"]:
            entries = [self.entry(repo, path) for path in files]
            self.send(json.dumps(entries).encode(), "application/json")
            return
        siblings = [{"rfilename": str(path.relative_to(repo))} for path in files]
        info = {"_id": "1", "id": repo_id, "modelId": repo_id, "sha": SHA, "private": False, "siblings": siblings}
        self.send(json.dumps(info).encode(), "application/json")

    @staticmethod
    def entry(repo: Path, path: Path) -> dict[str, object]:
        oid = hashlib.sha1(path.read_bytes()).hexdigest()
        return {"type": "file", "path": str(path.relative_to(repo)), "size": path.stat().st_size, "oid": oid}

    def file(self, path: Path) -> None:
        if not path.is_file():
            self.error(404, "EntryNotFound")
            return
        body = path.read_bytes()
        if self.command == "GET" and path.name in self.server.broken:
            self.server.broken.discard(path.name)
            self.head(200, len(body), path)
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        start = int(self.headers["Range"].split("=")[1].split("-")[0]) if self.headers.get("Range") else 0
        self.head(206 if start else 200, len(body) - start, path, start, len(body))
        if self.command == "GET":
            self.wfile.write(body[start:])

    def head(self, status: int, length: int, path: Path, start: int = 0, total: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("ETag", f'"{hashlib.sha1(path.read_bytes()).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()

    def send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
