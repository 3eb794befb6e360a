"""The engine's numbers at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """What `llm.engine.stats()` gives. kv_blocks_total = free + cached + in use; with nothing running, in use is 0."""

    running: int = 0
    waiting: int = 0
    preempted: int = 0  # so far
    kv_blocks_free: int = 0
    kv_blocks_cached: int = 0  # nobody uses them, but a prompt may find them again
    kv_blocks_in_use: int = 0
    kv_blocks_total: int = 0
    kv_bytes: int = 0  # of the whole pool
    prefix_cache_queries: int = 0  # prompt tokens looked up so far
    prefix_cache_hits: int = 0  # of these, found
    prefix_hit_rate: float = 0.0
    tokens_in: int = 0  # prompt tokens of admitted requests, cached ones included
    tokens_out: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    acceptance_rate: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0  # spent in steps so far
    scheduler_seconds: float = 0.0  # of these, in the engine's own Python (schedule, book, outputs)
