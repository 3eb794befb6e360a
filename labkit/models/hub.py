"""Models from the Hugging Face hub, through huggingface_hub: its cache, its settings (HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE, HF_ENDPOINT), and its resuming of interrupted downloads."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from tqdm import tqdm

from labkit.errors import ModelError
from labkit.models.hf_config import read_json

# What an engine needs of a repository: no pickles, no other framework's weights, no subfolders.
_ALLOWED = ["*.json", "*.safetensors", "*.jinja"]
_IGNORED = ["*/*", "consolidated*.safetensors"]
PROBE_SECONDS = 5.0


class _Silent(tqdm):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "disable": True})


def cached(repo_id: str) -> Path | None:
    """The folder of a model that was downloaded before, if all of it is there."""
    try:
        folder = Path(_snapshot(repo_id, local_files_only=True))
    except (errors.LocalEntryNotFoundError, OSError, ValueError):
        return None
    return folder if _is_complete(folder) else None


def is_reachable(repo_id: str) -> bool:
    """Ask the hub for this model, for at most a few seconds."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.HfApi().model_info(repo_id, timeout=PROBE_SECONDS)
    except Exception:  # no network, no such host, a proxy that refuses: all mean no
        return False
    return True


def download(repo_id: str, progress: bool = True) -> Path:
    """Fetch a model, or what is missing of it, into huggingface_hub's cache.

    Raises:
        ModelError: saying what the hub said, and what to do about it.
    """
    try:
        folder = Path(_snapshot(repo_id, tqdm_class=None if progress else _Silent))
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo_id} is gated: accept its terms on its page on the hub, then log in with `hf auth login` or HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{repo_id} is not on the hub, or private: check the spelling, or log in with `hf auth login` or HF_TOKEN"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ModelError(f"{repo_id} is neither a folder here nor in the hub's cache, and {why}") from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise ModelError(f"{repo_id} could not be downloaded: {error}") from None
        free = shutil.disk_usage(_existing(Path(constants.HF_HUB_CACHE))).free
        raise ModelError(
            f"{repo_id} does not fit into {constants.HF_HUB_CACHE}: {free:,} bytes are free there; "
            "make room, or set HF_HOME to another disk. What is there already will be used."
        ) from None
    except Exception as error:  # the HTTP library's own, which changes between releases
        raise ModelError(f"{repo_id} could not be downloaded: {type(error).__name__}: {error}") from None
    if not _is_complete(folder):
        raise ModelError(
            f"{repo_id} has no config.json with tokenizer.json and *.safetensors on the hub; "
            "of a repository with GGUF files, download one file and give its path"
        )
    return folder


def _snapshot(repo_id: str, **options: Any) -> str:
    return huggingface_hub.snapshot_download(repo_id, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED, **options)


def _is_complete(folder: Path) -> bool:
    """True if the small files are there, and the weights as one file or as all shards of the index."""
    if not all((folder / name).exists() for name in ("config.json", "tokenizer.json")):
        return False
    if (folder / "model.safetensors").exists():
        return True
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return False
    shards = read_json(index).get("weight_map") or {}
    return all((folder / name).exists() for name in set(shards.values()))


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
