from __future__ import annotations

import statistics

from labkit.engine.latencies import MOST_VALUES, WINDOW_SECONDS, Percentiles, Recent


def test_percentiles_are_values_that_were_measured():
    recent = Recent()
    assert recent.percentiles(0.0) is None
    recent.add(0.0, 5.0)
    assert recent.percentiles(0.0) == Percentiles(5.0, 5.0, 1)
    for value in range(1, 100):
        recent.add(1.0, float(value) if value != 5 else 100.0)
    got = recent.percentiles(1.0)
    assert got == Percentiles(50.0, 95.0, 100)
    assert got.p50 == statistics.median_low(range(1, 101))


def test_what_is_old_is_forgotten():
    recent = Recent()
    recent.add(0.0, 1.0)
    recent.add(WINDOW_SECONDS / 2, 2.0)
    assert recent.percentiles(WINDOW_SECONDS) == Percentiles(1.0, 2.0, 2)
    assert recent.percentiles(WINDOW_SECONDS + 0.1) == Percentiles(2.0, 2.0, 1)
    assert recent.percentiles(2 * WINDOW_SECONDS) is None


def test_memory_is_bounded():
    recent = Recent()
    for number in range(MOST_VALUES + 10):
        recent.add(0.0, float(number))
    assert recent.percentiles(0.0).count == MOST_VALUES
