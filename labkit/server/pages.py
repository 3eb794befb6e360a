"""The files of the dashboard, read once. There is nothing of the engine in them, so they need no key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starlette.responses import Response

FOLDER = Path(__file__).parent / "dashboard"
PATH = "/dashboard"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# The page is complete in itself; whatever else it might be made to load or to run, the browser refuses.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


@dataclass(frozen=True)
class Page:
    """A file as it goes out."""

    body: bytes
    media_type: str

    def response(self) -> Response:
        headers = {"cache-control": "no-cache"}
        if self.media_type == "text/html":
            headers["content-security-policy"] = POLICY
        return Response(self.body, media_type=self.media_type, headers=headers)


def _read() -> dict[str, Page]:
    """By path: the page itself is at /dashboard, its parts are below it."""
    files = [file for file in sorted(FOLDER.rglob("*")) if file.suffix in TYPES]
    names = {file: file.relative_to(FOLDER).as_posix() for file in files}
    return {
        PATH if name == "index.html" else f"{PATH}/{name}": Page(file.read_bytes(), TYPES[file.suffix])
        for file, name in names.items()
    }


PAGES = _read()
