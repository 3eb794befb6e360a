"""What the machine tells, and what it does not."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from labkit.server.sensors import GpuMetrics, GpuReadings, GpuSensor, ProcessReadings, ProcessSensor


class NVMLError(Exception):
    pass


def fake_nvml(**answers):
    """NVML as far as it is asked; without an answer it raises, as a driver does."""

    def ask(name):
        def answer(*_):
            if name not in answers:
                raise NVMLError("not supported")
            return answers[name]() if callable(answers[name]) else answers[name]

        return answer

    names = (
        "MemoryInfo PowerUsage TotalEnergyConsumption UtilizationRates Temperature ClockInfo HandleByUUID Name".split()
    )
    constants = {"NVML_TEMPERATURE_GPU": 0, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2}
    functions = {f"nvmlDeviceGet{name}": ask(name) for name in names}
    return SimpleNamespace(nvmlInit=lambda: None, NVMLError=NVMLError, **constants, **functions)


def test_a_card_that_tells_all(monkeypatch):
    energies = itertools.chain([5000], itertools.repeat(9000))
    nvml = fake_nvml(
        HandleByUUID="card",
        Name="Some card",
        MemoryInfo=SimpleNamespace(used=3, total=8),
        PowerUsage=20_500,
        TotalEnergyConsumption=lambda: next(energies),
        UtilizationRates=SimpleNamespace(gpu=50, memory=1),
        Temperature=40,
        ClockInfo=1000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sensor = GpuSensor("abc")
    registry = CollectorRegistry()
    registry.register(GpuMetrics(sensor))
    text = generate_latest(registry).decode()
    for line in (
        "gpu_memory_used_bytes 3.0",
        "gpu_power_watts 20.5",
        "gpu_utilization_ratio 0.5",
        "energy_joules_total 4.0",
    ):
        assert f"\nlabkit_{line}\n" in text
    want = GpuReadings("Some card", 3, 8, 20.5, 4.0, 0.5, 40, 1000, 1000)
    assert sensor.read() == want


def test_a_card_that_tells_nothing_more_than_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(HandleByUUID="card", Name="Some card"))
    assert GpuSensor("GPU-abc").read() == GpuReadings("Some card")
    assert list(GpuMetrics(GpuSensor("GPU-abc")).collect()) == [], "absent, not 0"


def test_no_card_no_library_no_driver(monkeypatch):
    assert GpuSensor(None).read() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # its import fails
    assert GpuSensor("abc").read() is None
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert GpuSensor("abc").read() is None


def test_a_process():
    sensor = ProcessSensor()
    assert sensor.read(None) == ProcessReadings()
    first = sensor.read(os.getpid())
    assert first.cpu_cores is None and first.memory_bytes > 10_000_000
    sum(range(2_000_000))
    assert sensor.read(os.getpid()).cpu_cores > 0


@pytest.mark.skipif(os.name == "nt", reason="its ids are taken again at once")
def test_a_process_that_has_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert ProcessSensor().read(child.pid) == ProcessReadings()
