"""Colab: install what labkit needs and Colab lacks, and nothing else. Run as a script, before labkit can be imported.

Colab's torch, triton, numpy and ipykernel fit its GPU driver and its running kernel: they are never touched.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = "https://github.com/your_fork/labkit"
TAG = "v0.1.0"
BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    f"(https://colab.research.google.com/github/{REPOSITORY.removeprefix('https://github.com/')}/blob/{TAG}/notebooks/{{notebook}})"
)
# The first code cell of every lesson; only on Colab does it do anything.
SETUP_CELL = f"""
import importlib.util
import subprocess
import sys

if "google.colab" in sys.modules and importlib.util.find_spec("labkit") is None:
    clone = "git clone --quiet --depth=1 --branch={TAG} {REPOSITORY} /content/labkit"
    subprocess.run(clone.split(), check=True)
    subprocess.run([sys.executable, "/content/labkit/labkit/lab/colab.py"], check=True)
    sys.path.insert(0, "/content/labkit")
"""
KEPT = ("torch", "triton", "numpy", "ipykernel")


def name_of(requirement: str) -> str:
    """ "foo_bar[x]>=1; marker" is foo-bar."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match.group()).lower() if match else ""


def installed() -> dict[str, str]:
    """Version by name of everything that can be imported here."""
    found = importlib.metadata.distributions()
    return {name_of(d.metadata["Name"]): d.version for d in found if d.metadata["Name"]}


def missing(requirements: list[str], have: dict[str, str]) -> list[str]:
    """The requirements whose package is not there in any version."""
    return [r for r in requirements if name_of(r) not in have and name_of(r) not in KEPT]


def constraints(have: dict[str, str]) -> list[str]:
    """Lines that keep pip from moving the packages in KEPT."""
    return [f"{name}=={have[name]}" for name in KEPT if name in have]


def main() -> int:
    root = Path(__file__).resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    have = installed()
    wanted = missing(project["dependencies"], have)
    if wanted:
        pins = root / "colab-constraints.txt"
        pins.write_text("\n".join(constraints(have)) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(pins), *wanted]
        if subprocess.run(command).returncode:
            print(f"labkit: error: pip could not install {', '.join(map(name_of, wanted))}", file=sys.stderr)
            return 1
    print("installed:", ", ".join(map(name_of, wanted)) or "nothing was missing")
    print("kept:", ", ".join(f"{name} {have[name]}" for name in KEPT if name in have))
    return 0


if __name__ == "__main__":
    sys.exit(main())
