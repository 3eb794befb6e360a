"""What the machine itself tells: the GPU through NVML, the processes through the operating system.

What cannot be measured is None, never 0.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class GpuReadings:
    """None where this card or its driver does not tell.

    Attributes:
        power_watts: now; where the card averages, over its last second.
        energy_joules: since this server began to look.
        utilization: share of the last sample period in which a kernel ran.
    """

    name: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    utilization: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None


@dataclass(frozen=True)
class ProcessReadings:
    """Of the engine's process.

    Attributes:
        cpu_cores: processor time a second since the last reading: 1.5 is one and a half cores.
        memory_bytes: resident.
    """

    cpu_cores: float | None = None
    memory_bytes: int | None = None


class ProcessSensor:
    """Follows a process by its id; another id, after a restart, begins anew."""

    def __init__(self) -> None:
        self._process: psutil.Process | None = None

    def read(self, pid: int | None) -> ProcessReadings:
        if pid is None:
            return ProcessReadings()
        try:
            if self._process is None or self._process.pid != pid:
                self._process = psutil.Process(pid)
                self._process.cpu_percent()  # the first call only begins to count
                return ProcessReadings(memory_bytes=self._process.memory_info().rss)
            return ProcessReadings(self._process.cpu_percent() / 100, self._process.memory_info().rss)
        except psutil.Error:  # it has gone
            self._process = None
            return ProcessReadings()


class GpuSensor:
    """One card; each reading takes milliseconds.

    Args:
        uuid: as CUDA names it; None where no GPU is used, and then nothing is measured.
    """

    def __init__(self, uuid: str | None):
        self._nvml: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._first_energy: float | None = None
        if uuid is not None:
            # No library, no driver, no right: each has an exception of its own, and each means "not measured".
            with contextlib.suppress(Exception):
                self._open(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def _open(self, uuid: str) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._card = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._name = pynvml.nvmlDeviceGetName(self._card)
        self._nvml, self._errors = pynvml, (pynvml.NVMLError,)
        self._first_energy = self._ask(lambda n, card: n.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3)

    def read(self) -> GpuReadings | None:
        """None without a card, or where nothing can be asked of it."""
        if self._nvml is None:
            return None
        memory = self._ask(lambda n, card: n.nvmlDeviceGetMemoryInfo(card))
        energy = self._ask(lambda n, card: n.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3)
        return GpuReadings(
            name=self._name,
            memory_used_bytes=memory and memory.used,
            memory_total_bytes=memory and memory.total,
            power_watts=self._ask(lambda n, card: n.nvmlDeviceGetPowerUsage(card) / 1e3),
            energy_joules=None if energy is None or self._first_energy is None else energy - self._first_energy,
            utilization=self._ask(lambda n, card: n.nvmlDeviceGetUtilizationRates(card).gpu / 100),
            temperature_celsius=self._ask(lambda n, card: n.nvmlDeviceGetTemperature(card, n.NVML_TEMPERATURE_GPU)),
            sm_clock_mhz=self._ask(lambda n, card: n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_SM)),
            memory_clock_mhz=self._ask(lambda n, card: n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_MEM)),
        )

    def _ask(self, question: Callable[[Any, Any], Any]) -> Any:
        try:
            return question(self._nvml, self._card)
        except self._errors:
            return None


class TaskMetrics(Collector):
    """For /metrics, asked for in the event loop: a request has some tasks, and leaves none."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("labkit_asyncio_tasks", "Tasks of the server's event loop", len(asyncio.all_tasks()))


class GpuMetrics(Collector):
    """A card's readings for /metrics, taken when they are asked for. What it does not tell is absent."""

    def __init__(self, sensor: GpuSensor):
        self._sensor = sensor

    def collect(self) -> Iterator[Metric]:
        readings = self._sensor.read()
        if readings is None:
            return
        for name, text, value in (
            ("gpu_memory_used_bytes", "Memory in use on the card, by all programs", readings.memory_used_bytes),
            ("gpu_power_watts", "What the card draws", readings.power_watts),
            ("gpu_utilization_ratio", "Share of the last sample period in which a kernel ran", readings.utilization),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"labkit_{name}", text, value)
        if readings.energy_joules is not None:
            yield CounterMetricFamily("labkit_energy_joules", "Since this server began", readings.energy_joules)
