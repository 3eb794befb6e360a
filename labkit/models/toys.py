"""The models that come with labkit: whether their files are the ones that were shipped.

toys.json, beside this file, holds the SHA-256 of each; data/make_toy.py writes it together with the models.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from labkit.errors import ModelError

HASHES = Path(__file__).with_name("toys.json")
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def check_files(name: str, folder: Path) -> None:
    """Compare every file of a shipped model with its hash: some ten milliseconds.

    Raises:
        ModelError: naming each file that is missing or different, with the hash that it should have.
    """
    wrong = []
    for file, expected in json.loads(HASHES.read_text(encoding="utf-8"))[name].items():
        path = folder / file
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        if found is None:
            wrong.append(f"{path} is missing; its SHA-256 should be {expected}")
        elif found != expected:
            wrong.append(
                f"{path} is not the file that labkit came with: its SHA-256 is {found}, it should be {expected}"
            )
    if wrong:
        raise ModelError(f"{name}: {'; '.join(wrong)}. {how_to_get_back(name, folder)}")


def how_to_get_back(name: str, folder: Path | None) -> str:
    """In a checkout git has the files; `folder` is None where nobody knows."""
    if folder is not None and not (folder.parents[1] / ".git").exists():
        return "Install labkit again"
    where = f"data/{name}" if folder is None else folder
    return f"Get it back with `git checkout -- {where}`" + ("" if folder else " in a checkout, or install labkit again")
