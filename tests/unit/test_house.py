"""That the files around the package agree with one another: what installs it, what checks it, what describes it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import labkit

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(n): v for n, v in (line.split("==") for line in lines if not line.startswith("#"))}


def test_one_version() -> None:
    assert PROJECT["version"] == labkit.__version__


def test_environment_yml_installs_what_pyproject_lists() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    # No list of its own that could fall behind: conda brings Python and pip, pip reads pyproject.toml.
    assert conda == ["python=3.12", "pip"]
    assert pip == ["-e .[lab]"]
    assert "lab" in PROJECT["optional-dependencies"]
    assert "3.12" in SpecifierSet(PROJECT["requires-python"])


@pytest.mark.parametrize("group", ["base", "lab", "test"])
def test_constraints_pin_every_requirement_within_its_range(group: str) -> None:
    listed = PROJECT["dependencies"] if group == "base" else PROJECT["optional-dependencies"][group]
    pinned = pins()
    for requirement in map(Requirement, listed):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert version in requirement.specifier, f"{requirement} is not met by the pinned {version}"


def test_constraints_leave_the_choice_of_build_to_the_machine() -> None:
    # 2.13.0+cpu exists in few places; 2.13.0 is met by it and by every other build.
    assert [name for name, version in pins().items() if "+" in version] == []


def test_every_room_has_its_place_in_the_import_rules() -> None:
    layers = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    named = {name.strip(" ()") for layer in layers for name in layer.split(":")}
    there = {
        path.stem for path in (ROOT / "labkit").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert there - {"__init__", "__main__"} <= named


def test_pre_commit_downloads_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    assert all(hook["language"] == "system" for repo in config["repos"] for hook in repo["hooks"])


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


# ---- shell and make: what macOS's tools do not know ------------------------------------------------------------------

SHELL_FILES = ["Makefile", "scripts/install.sh", "scripts/test.sh"]


@pytest.mark.parametrize("name", SHELL_FILES)
def test_no_tool_options_that_only_gnu_has(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    gnu_only = r"sed -i|readlink -f|grep -P|date -d|xargs -r|sort -V|\btimeout \d|\bnproc\b|\.ONESHELL|\$\(file "
    assert re.findall(gnu_only, text) == []


@pytest.mark.parametrize("name", ["scripts/install.sh", "scripts/test.sh"])
def test_shell_scripts_parse(name: str) -> None:
    subprocess.run(["sh", "-n", str(ROOT / name)], check=True)


@pytest.mark.parametrize("target", ["lab", "test", "test-gpu", "notebooks", "format", "clean", "help"])
def test_make_knows_the_target(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- README ----------------------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    assert "docs/one-step.svg" in links
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert missing == []


def test_readme_names_only_make_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ((?:lab|test|notebooks|format|clean)[a-z-]*)\b", README)) <= targets


def test_readme_names_only_commands_that_exist() -> None:
    named = set(re.findall(r"^(?:\.venv/bin/)?labkit ([a-z]+)", README, flags=re.MULTILINE))
    assert named
    shown = subprocess.run([sys.executable, "-m", "labkit", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert [command for command in named if not re.search(rf"\b{command}\b", shown.stdout)] == []


def test_readme_folder_table_is_in_the_order_of_the_import_rules() -> None:
    layers = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    order = [name.strip(" ()") for layer in reversed(layers) for name in layer.split(":")]
    rows = re.findall(r"^\| `labkit/([a-z]+)(?:\.py|/)`", README, flags=re.MULTILINE)
    assert rows == [name for name in order if name in rows]


def test_picture_reads_on_a_dark_page() -> None:
    svg = (ROOT / "docs" / "one-step.svg").read_text(encoding="utf-8")
    assert "<title" in svg and "<desc" in svg
    # The first shape is a background as large as the picture.
    width, height = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups()  # type: ignore[union-attr]
    first = re.search(r"</defs>.*?(<rect[^>]*>)", svg, flags=re.DOTALL)
    assert first and f'width="{width}"' in first[1] and f'height="{height}"' in first[1] and "fill=" in first[1]
