"""Programmatic dependent launch: on Hopper a kernel may start before the one in front of it has ended.

    kernel A   ├──── work ────────────┤
    kernel B              ├ weights ┤·├──── work ────┤      B's weights are on their way while A still runs
                 launched ▲           ▲ gdc_wait: A has ended, and what it wrote can be read

Each kernel says with `gdc_launch_dependents` that the next one may start, loads what no kernel before it writes (that
is weights, and what earlier steps have left in the KV cache), and calls `gdc_wait` before anything else, above all
before its first store. As every kernel waits, the end of one means the end of all before it. Kernels of PyTorch may
stand between them: they wait too, for all of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

HOPPER = (9, 0)


def dependent(device: torch.device) -> dict[str, Any]:
    """Launch options for a kernel with a `PDL` switch: on where the device can."""
    return {"PDL": True, "launch_pdl": True} if _can_launch_early(device) else {"PDL": False}


@functools.cache
def _can_launch_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER
