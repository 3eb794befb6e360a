"""Prometheus metrics of the engine, made from what its steps report."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from labkit.engine.latencies import Recent
from labkit.engine.request import Delta, StepReport
from labkit.engine.stats import EngineStats

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FINISH_REASONS = ("stop", "length", "abort")


class EngineMetrics:
    """Counters, gauges and histograms in a registry of their own; feed it every step's report."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(f"labkit_{name}", text, registry=self.registry)
            for name, text in (
                ("num_requests_running", "Answers that are being computed"),
                ("num_requests_waiting", "Answers that wait for a place"),
                ("kv_cache_usage_ratio", "Share of KV blocks in use; cached blocks that nobody uses do not count"),
            )
        }
        self._counters = {
            name: Counter(f"labkit_{name}", text, registry=self.registry)
            for name, text in (
                ("prompt_tokens", "Prompt tokens of admitted requests, cached ones included"),
                ("generation_tokens", "Tokens drawn"),
                ("preemptions", "Times that a running answer lost its blocks"),
                ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
                ("prefix_cache_hits", "Of these, found"),
                ("spec_draft_tokens", "Tokens proposed by speculation"),
                ("spec_accepted_tokens", "Of these, accepted"),
            )
        }
        self._requests = Counter(
            "labkit_requests",
            "Requests that ended, by the reason of the answer that ended last",
            ["finish_reason"],
            registry=self.registry,
        )
        for reason in FINISH_REASONS:
            self._requests.labels(reason)
        self._histograms = {
            name: Histogram(f"labkit_{name}", text, buckets=buckets, registry=self.registry)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "From arrival to the first token", SECONDS),
                ("inter_token_latency_seconds", "Between two tokens of an answer", SECONDS),
                ("e2e_request_latency_seconds", "From arrival to the end", SECONDS),
                ("request_queue_seconds", "From arrival to the first step", SECONDS),
                ("step_tokens", "Tokens computed in a step", TOKENS),
            )
        }
        self.recent_ttft = Recent()
        self.recent_gaps = Recent()  # between two tokens of an answer
        self._last = EngineStats()
        self._last_token: dict[tuple[str, int], float] = {}
        self._answers_left: dict[str, int] = {}  # of requests of which some answers have ended

    def observe(self, report: StepReport, stats: EngineStats) -> None:
        """Book one step. `stats` are cumulative; the counters move by the difference to the last call."""
        self._gauges["num_requests_running"].set(stats.running)
        self._gauges["num_requests_waiting"].set(stats.waiting)
        self._gauges["kv_cache_usage_ratio"].set(stats.kv_blocks_in_use / max(1, stats.kv_blocks_total))
        last, self._last = self._last, stats
        for name, now, before in (
            ("prompt_tokens", stats.tokens_in, last.tokens_in),
            ("generation_tokens", stats.tokens_out, last.tokens_out),
            ("preemptions", stats.preempted, last.preempted),
            ("prefix_cache_queries", stats.prefix_cache_queries, last.prefix_cache_queries),
            ("prefix_cache_hits", stats.prefix_cache_hits, last.prefix_cache_hits),
            ("spec_draft_tokens", stats.draft_tokens, last.draft_tokens),
            ("spec_accepted_tokens", stats.accepted_tokens, last.accepted_tokens),
        ):
            self._counters[name].inc(max(0, now - before))
        if report.num_tokens:
            self._histograms["step_tokens"].observe(report.num_tokens)
        now_seconds = time.monotonic()
        for delta in report.deltas:
            self._observe_delta(delta, now_seconds)

    def _observe_delta(self, delta: Delta, now: float) -> None:
        key = (delta.request_id, delta.index)
        if delta.token_ids:
            previous = self._last_token.get(key)
            if previous is not None:
                self._histograms["inter_token_latency_seconds"].observe(now - previous)
                self.recent_gaps.add(now, now - previous)
            elif delta.first_token_time is not None and delta.first_scheduled_time is not None:
                ttft = delta.first_token_time - delta.arrival_time
                self._histograms["time_to_first_token_seconds"].observe(ttft)
                self.recent_ttft.add(now, ttft)
                self._histograms["request_queue_seconds"].observe(delta.first_scheduled_time - delta.arrival_time)
            self._last_token[key] = now
        if delta.finish_reason is not None:
            self._last_token.pop(key, None)
            left = self._answers_left.pop(delta.request_id, delta.choices) - 1
            if left:
                self._answers_left[delta.request_id] = left
                return
            self._requests.labels(delta.finish_reason).inc()
            if delta.finished_time is not None:
                self._histograms["e2e_request_latency_seconds"].observe(delta.finished_time - delta.arrival_time)

    def render(self) -> bytes:
        """The text that a Prometheus server reads."""
        return generate_latest(self.registry)
