"""Metrics of a server, in Prometheus' text format, and the log line of a request."""

import datetime
import json
import logging
import time
from functools import partial
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from infinigen_jax.decode.layer import Decoder
from infinigen_jax.server.answer import Job, tokens_per_second

logger = logging.getLogger("infinigen_jax.requests")
disable_created_metrics()

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKENS = tuple(4.0**n for n in range(2, 9))


class Metrics:
    """Counters, gauges and histograms; used by one thread, read by any."""

    def __init__(self, decoder: Decoder):
        self._registry = registry = CollectorRegistry()
        self._bytes_per_row = decoder.row_format.width * decoder.row_format.storage.itemsize
        fixed: dict[str, Any] = {"namespace": "infinigen", "registry": registry}
        counter, gauge = partial(Counter, **fixed), partial(Gauge, **fixed)
        histogram = partial(Histogram, buckets=SECONDS, **fixed)
        self._requests = counter("requests", "Accepted prompts by outcome", ["outcome"])
        self._prompt = counter("prompt_tokens", "Prompt tokens read, cached ones included")
        self._cached = counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache")
        self._new = counter("new_tokens", "Tokens drawn")
        self._moved = counter("fetched_bytes", "Bytes of rows moved to the device by steps")
        self.drafted = counter("drafted_tokens", "Tokens drafted by a lossless server")
        self.accepted = counter("accepted_tokens", "Drafted tokens that the full cache confirmed")
        self.waiting = gauge(
            "waiting_requests", "Prompts without a sequence: waiting, being read or read"
        )
        self.running = gauge("running_answers", "Sequences of the batch in use")
        self.prefix_bytes = gauge("prefix_cache_bytes", "Host bytes of the prefix cache")
        self.host_bytes = gauge("host_cache_bytes", "Host bytes of the batch's KV cache")
        self.compilations = gauge("compilations_after_warmup", "XLA compilations; 0 is expected")
        self._first = histogram(
            "first_token_seconds", "Time from a prompt's arrival in the queue to its first token"
        )
        self._between = histogram("token_seconds", "Time between two tokens of an answer")
        self._whole = histogram(
            "request_seconds", "Time from a prompt's arrival in the queue to its end"
        )
        self._length = histogram("request_prompt_tokens", "Length of a prompt", buckets=TOKENS)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def token(self, seconds: float, *, first: bool) -> None:
        """Count a drawn token, and the time since the one before or the request's arrival."""
        self._new.inc()
        (self._first if first else self._between).observe(seconds)

    def rows(self, moved: int) -> None:
        self._moved.inc(moved * self._bytes_per_row)

    def done(self, job: Job, outcome: str) -> None:
        """Count a request that ended, and log it as one line of JSON."""
        seconds = time.perf_counter() - job.arrived
        self._requests.labels(outcome).inc()
        self._prompt.inc(job.read_tokens)
        self._cached.inc(job.cached_tokens)
        self._whole.observe(seconds)
        self._length.observe(len(job.tokens))
        record = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "outcome": outcome,
            "prompt_tokens": len(job.tokens),
            "cached_tokens": job.cached_tokens,
            "new_tokens": job.new_tokens,
            "first_token_seconds": round(job.first - job.arrived, 4) if job.first else None,
            "tokens_per_second": round(tokens_per_second([job]), 2),
            "fetched_fraction": round(job.fetched_fraction, 5),
            "seconds": round(seconds, 4),
        }
        logger.info(json.dumps(record))
