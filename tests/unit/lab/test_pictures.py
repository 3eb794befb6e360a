"""Pictures and source: words beside them, no trust needed, the same bytes every time."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import labkit.config
from labkit.config import EngineConfig
from labkit.kernels import rms_norm
from labkit.lab import show
from labkit.lab.source import Source


def draw() -> show.Picture:
    with plt.rc_context(show.style()):
        fig, ax = plt.subplots()
        ax.plot([1, 2], [3, 4], label="a line")
        ax.legend()
    return show.show(fig, 'two points, "3" & <4>')


def test_show() -> None:
    picture = draw()
    page = picture._repr_html_()
    assert 'alt="two points, &quot;3&quot; &amp; &lt;4&gt;"' in page
    assert page.startswith("<figure><img ")
    data = re.search(r"base64,([^\"]+)", page)
    assert data is not None
    svg = base64.b64decode(data.group(1)).decode()
    assert svg.startswith("<svg")
    assert show.BLUE.lower() in svg.lower()
    assert "#ffffff" not in svg.lower(), "no white ground: the page may be dark"
    assert not plt.get_fignums(), "the figure is closed"
    assert draw().svg == picture.svg


def test_alt_is_needed() -> None:
    with pytest.raises(ValueError, match="alt is empty"):
        show.Picture("<svg/>", " ")


@pytest.mark.parametrize("ground", ["#ffffff", "#111111"])
@pytest.mark.parametrize("colour", [show.INK, *show.COLOURS])
def test_contrast(colour: str, ground: str) -> None:
    # WCAG 2.1, 1.4.11 wants 3:1 for lines and shapes; text (INK) has 4:1. The light ones always come with a label.
    needed = 4 if colour == show.INK else 3 if colour in (show.BLUE, show.GREEN, show.VERMILLION) else 2
    assert contrast(colour, ground) >= needed


def contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_source_is_the_real_one() -> None:
    source = Source(EngineConfig)
    assert source.path == "labkit/config.py"
    lines = Path(labkit.config.__file__).read_text(encoding="utf-8").splitlines()
    assert lines[source.first - 1] == "@dataclass(frozen=True)"
    assert "max_num_seqs: int = 256" in source.code
    assert repr(source).startswith(f"# labkit/config.py, lines {source.first} to {source.last}\n")


def test_source_can_be_folded() -> None:
    assert Source(EngineConfig)._repr_html_().startswith("<details open>")
    assert Source(EngineConfig, folded=True)._repr_html_().startswith("<details><summary>")


def test_source_of_what_has_none() -> None:
    with pytest.raises(ValueError, match="no source can be found for 3"):
        Source(3)


def test_source_of_a_kernel() -> None:
    source = Source(rms_norm._rms_norm_kernel)
    assert source.path == "labkit/kernels/rms_norm.py"
    assert "def _rms_norm_kernel(" in source.code
    assert "tl.store(" in source.code.splitlines()[-1]


def test_source_of_csrc() -> None:
    source = Source("rms_norm.cpp:labkit_rms_norm")
    assert source.path == "csrc/rms_norm.cpp"
    assert source.code.startswith("// y = x / rms(x) * weight"), "with the comment above it"
    assert source.code.endswith("}")
    assert "add_rms_norm" not in source.code
    lines = Path(labkit.config.__file__).parents[1].joinpath(source.path).read_text(encoding="utf-8").splitlines()
    assert source.code.splitlines() == lines[source.first - 1 : source.last]
    kernel = Source("rms_norm.cu:rms_norm").code
    assert "template <typename T, int WIDE, int COUNT, bool ADD>\n__global__ void" in kernel
    assert "<<<" not in kernel


@pytest.mark.parametrize("name", ["rms_norm.cpp:nothing", "nothing.cpp:rms_norm", "rms_norm.cpp"])
def test_source_of_csrc_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match="give a file of csrc/ and a function"):
        Source(name)
