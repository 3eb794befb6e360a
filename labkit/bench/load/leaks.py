"""Whether a server's memory, files, threads, tasks and blocks are as many after a crowd as before it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from labkit.bench.load.record import Check, Sample
from labkit.bench.load.servers import Remote, Server

SECONDS_BETWEEN_SAMPLES = 1.0
WARM_UP_SHARE = 0.25  # of the time; what is made on first use is made by then
GROWTH = 0.03  # of the memory after the warm-up that may still come, …
GROWTH_BYTES = 16 << 20  # … or so much: an allocator keeps some pages
# Zero when nobody is served. Not every server tells all of them.
IDLE_GAUGES = ("labkit_num_requests_running", "labkit_num_requests_waiting", "labkit_kv_cache_usage_ratio")
TASKS = "labkit_asyncio_tasks"  # never zero: the server has some of its own


class Watch:
    """Looks at a server's processes and gauges.

    Attributes:
        samples: under load, one a second.
        before, after: at rest, before the crowd came and once it had gone.
    """

    def __init__(self, server: Remote):
        self._server = server
        self._began = time.monotonic()
        self.samples: list[Sample] = []
        self.before: Sample | None = None
        self.after: Sample | None = None

    async def run(self, bar: tqdm) -> None:
        """Until it is cancelled."""
        began = time.monotonic()
        with bar:
            while True:
                self.samples.append(await asyncio.to_thread(self.look))
                await asyncio.sleep(SECONDS_BETWEEN_SAMPLES)
                bar.update(round(time.monotonic() - began) - bar.n)

    async def idle(self, seconds: float) -> None:
        """Wait until the server is at rest, its connections closed; the first call is `before`, the next `after`."""
        until = time.monotonic() + seconds
        sample = await asyncio.to_thread(self.look)
        while time.monotonic() < until and not self._rests(sample):
            await asyncio.sleep(0.2)
            sample = await asyncio.to_thread(self.look)
        if self.before is None:
            self.before = sample
        else:
            self.after = sample

    def _rests(self, sample: Sample) -> bool:
        before = self.before or sample
        return sample.fds <= before.fds and sample.tasks <= before.tasks and not any(sample.gauges.values())

    def look(self) -> Sample:
        family = self._server.family() if isinstance(self._server, Server) else []
        rss = fds = threads = 0
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
                rss += process.memory_info().rss
                fds += process.num_fds()
                threads += process.num_threads()
        gauges = gauges_of(self._server.metrics())
        tasks = round(gauges.pop(TASKS, 0))
        return Sample(round(time.monotonic() - self._began, 2), len(family), rss, fds, threads, gauges, tasks)


def gauges_of(metrics: str) -> dict[str, float]:
    """Those of IDLE_GAUGES that are there, and TASKS."""
    families = text_string_to_metric_families(metrics)
    return {f.name: sum(s.value for s in f.samples) for f in families if f.name in (*IDLE_GAUGES, TASKS)}


def judge(watch: Watch) -> list[Check]:
    """Blocks and requests, tasks, files, threads, memory."""
    before, after = watch.before, watch.after
    assert before is not None and after is not None
    left = {name: value for name, value in after.gauges.items() if value}
    told = ", ".join(f"{name} {value:g}" for name, value in (left or after.gauges).items())
    checks = [Check("no block and no request is left", bool(after.gauges) and not left, told or "it has no gauges")]
    if before.tasks:
        checks.append(_no_more("tasks of the event loop are as many as before", before.tasks, after.tasks))
    if not before.processes:
        return checks
    checks.append(_no_more("file descriptors are as many as before", before.fds, after.fds))
    warm = watch.samples[round(len(watch.samples) * WARM_UP_SHARE) :]
    half = len(warm) // 2
    if half:
        most = [max(s.threads for s in part) for part in (warm[:half], warm[half:])]
        checks.append(_no_more("threads do not become more after the warm-up", *most))
        checks.append(memory_is_flat(warm))
    same = before.processes == after.processes
    checks.append(Check("no process has died", same, f"{before.processes} before, {after.processes} after"))
    return checks


def _no_more(name: str, before: int, after: int) -> Check:
    return Check(name, after <= before, f"{before} before, {after} after")


def memory_is_flat(warm: Sequence[Sample]) -> Check:
    """A straight line through all samples after the warm-up: how much does it rise from its beginning to its end?"""
    t = np.array([s.t_s for s in warm])
    rss = np.array([s.rss_bytes for s in warm], dtype=float)
    slope, _ = np.polyfit(t, rss, 1)
    growth, mib = slope * (t[-1] - t[0]), 1 << 20
    allowed = max(GROWTH * rss[0], GROWTH_BYTES)
    found = f"{growth / mib:+.1f} MiB on {rss[0] / mib:.0f} MiB in {t[-1] - t[0]:.0f} s, {allowed / mib:.0f} allowed"
    return Check("memory is flat after the warm-up", bool(growth <= allowed), found)
