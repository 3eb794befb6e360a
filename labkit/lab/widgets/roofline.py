"""The roofline (Williams, Waterman, Patterson 2009): what a box can do at most, by FLOPs for each byte it reads.

FLOP/s
  │        ________  peak: the arithmetic units are busy
  │      ╱
  │    ╱   bandwidth × FLOPs a byte: memory is busy
  └──────────────── FLOPs a byte
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from labkit.lab.roofline import Point, Roofline
from labkit.lab.show import BLUE, GREEN, ORANGE, VERMILLION
from labkit.lab.widgets import svg
from labkit.lab.widgets.stepper import Frame, Stepper

WIDTH, HEIGHT = 680, 380
LEFT, RIGHT, TOP, BOTTOM = 74, 20, 16, 52


@dataclass(frozen=True)
class Setting:
    """One place of the slider: a step of the model that could be run."""

    label: str
    flops: float
    bytes: float
    tokens: int  # that come out of it


@dataclass(frozen=True)
class Data:
    """Everything that is drawn."""

    machine: str
    bandwidth: float
    peak: float
    points: tuple[Point, ...]
    settings: tuple[Setting, ...]


class Axes:
    """Logarithmic axes that hold the two limits and every point."""

    def __init__(self, data: Data):
        ridge = data.peak / data.bandwidth
        intensities = [ridge * 16, ridge / 64, *(point.intensity for point in data.points)]
        intensities += [setting.flops / setting.bytes for setting in data.settings]
        rates = [data.peak * 3, data.peak / 200] + [point.flop_rate for point in data.points]
        self.x = (math.floor(math.log10(min(intensities))), math.ceil(math.log10(max(intensities))))
        self.y = (math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates))))

    def at(self, intensity: float, rate: float) -> tuple[float, float]:
        across = (math.log10(intensity) - self.x[0]) / (self.x[1] - self.x[0])
        up = (math.log10(rate) - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def power(exponent: int) -> str:
    """10⁹ as people write it."""
    return {0: "1", 1: "10", 2: "100", 3: "1000", -1: "0.1", -2: "0.01"}.get(
        exponent, "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    )


def rate_name(exponent: int) -> str:
    """FLOPs a second in the unit that is said aloud."""
    for unit, zeros in (("T", 12), ("G", 9), ("M", 6)):
        if exponent >= zeros:
            return f"{10 ** (exponent - zeros)} {unit}"
    return power(exponent)


def draw_axes(axes: Axes) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [svg.line([(LEFT, TOP), (LEFT, bottom), (right, bottom)])]
    for exponent in range(axes.x[0], axes.x[1] + 1):
        x, _ = axes.at(10.0**exponent, 10.0 ** axes.y[0])
        parts += [svg.line([(x, bottom), (x, bottom + 5)]), svg.text(x, bottom + 19, power(exponent), anchor="middle")]
    for exponent in range(axes.y[0], axes.y[1] + 1):
        _, y = axes.at(10.0 ** axes.x[0], 10.0**exponent)
        parts += [svg.line([(LEFT - 5, y), (LEFT, y)]), svg.text(LEFT - 9, y + 4, rate_name(exponent), anchor="end")]
    parts.append(svg.text((LEFT + right) / 2, HEIGHT - 10, "FLOPs for each byte read", anchor="middle"))
    parts.append(svg.text(LEFT + 8, TOP + 10, "FLOP/s"))
    return parts


def draw_roof(axes: Axes, data: Data) -> list[str]:
    ridge = data.peak / data.bandwidth
    low, high = 10.0 ** axes.x[0], 10.0 ** axes.x[1]
    start = max(low, 10.0 ** axes.y[0] / data.bandwidth)
    corner = axes.at(ridge, data.peak)
    parts = [svg.line([axes.at(start, start * data.bandwidth), corner], colour=BLUE, width=3)]
    parts.append(svg.line([corner, axes.at(high, data.peak)], colour=VERMILLION, width=3, dash="9 4"))
    x, y = axes.at(high, data.peak)
    parts.append(svg.text(x, y - 9, f"arithmetic: {data.peak / 1e9:,.0f} GFLOP/s", anchor="end"))
    x, y = axes.at(math.sqrt(start * ridge), math.sqrt(start * ridge) * data.bandwidth)
    parts.append(svg.text(x - 8, y - 10, f"memory: {data.bandwidth / 1e9:,.1f} GB/s", anchor="end"))
    return parts


def draw_points(axes: Axes, data: Data) -> list[str]:
    parts: list[str] = []
    key_x, key_y = WIDTH - RIGHT - 230, HEIGHT - BOTTOM - 14 - 18 * (len(data.points) - 1)
    for number, point in enumerate(data.points, start=1):
        x, y = axes.at(point.intensity, point.flop_rate)
        parts += [svg.diamond(x, y, 6, colour=GREEN), svg.text(x + 9, y + 5, str(number))]
        label = f"{number}  {point.name}" + (f" ({point.lesson})" if point.lesson != "00" else "")
        parts.append(svg.text(key_x, key_y + 18 * (number - 1), label))
    return parts


def render(data: Data, step: int) -> Frame:
    """The roof, every point that was measured, and the chosen setting on the roof."""
    setting = data.settings[step]
    intensity = setting.flops / setting.bytes
    reading, arithmetic = setting.bytes / data.bandwidth, setting.flops / data.peak
    seconds, limit = max(reading, arithmetic), "memory" if reading > arithmetic else "compute"
    axes = Axes(data)
    x, y = axes.at(intensity, setting.flops / seconds)
    _, floor = axes.at(intensity, 10.0 ** axes.y[0])
    parts = draw_axes(axes) + draw_roof(axes, data) + draw_points(axes, data)
    parts += [svg.line([(x, y), (x, floor)], colour=ORANGE, width=2, dash="3 4"), svg.ring(x, y, 8, colour=ORANGE)]
    parts.append(svg.text(x + 14, y + 24, setting.label))
    words = (
        f"{setting.label}: {intensity:,.3g} FLOPs a byte. At least {seconds * 1e3:,.3g} ms for {setting.tokens} "
        f"token{'s' if setting.tokens != 1 else ''}, {setting.tokens / seconds:,.0f} tokens/s at best. "
        f"The limit is {limit}."
    )
    return Frame(svg.svg(WIDTH, HEIGHT, parts), words)


def widget(roofline: Roofline, settings: list[Setting], start: int = 0) -> Stepper:
    """The learner's roofline with a slider over settings.

    Raises:
        ValueError: before the machine's limits were measured.
    """
    bandwidth, peak = roofline.limits()
    data = Data(str(roofline.machine), bandwidth, peak, tuple(roofline.points), tuple(settings))
    return Stepper(render, data, [setting.label for setting in settings], "setting", start)
