"""`labkit doctor`: what this machine can run."""

from __future__ import annotations


def doctor() -> None:
    """What this machine can run: CPU, GPU, dtypes, Triton, compiler, and what falls back to what."""
    from labkit.doctor import examine

    for heading, facts in examine():
        print(heading)
        for name, text in facts:
            print(f"  {name:<18}{text}")
