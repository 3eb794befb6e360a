"""Where things lie: the user's cache, and what comes with labkit."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """$LABKIT_CACHE, or the user's cache folder of this operating system."""
    return Path(os.environ.get("LABKIT_CACHE") or platformdirs.user_cache_dir("labkit", appauthor=False)).expanduser()


def shipped(name: str) -> Path | None:
    """A folder of labkit's, such as "data/toy": beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent
    return next((path for path in (package.parent / name, package / name) if path.is_dir()), None)
