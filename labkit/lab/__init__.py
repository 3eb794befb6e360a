"""What the notebooks need and the engine does not. A notebook begins with `from labkit.lab import setup`.

Importing this must not import torch or triton: `setup` decides first how triton is to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.lab.session import Lab


def setup(number: str) -> Lab:
    """Begin lesson `number` ("00"): prepare this kernel, print what it runs on, give the lesson's helper."""
    from labkit.lab.setup import begin

    return begin(number)


__all__ = ["setup"]
