"""Prometheus metrics: request counts and times kept here, everything else read from a status snapshot.

Hit rates are never exported as such, only the counters they follow from, so that no window or probe can
distort them. Every series that has no engine, model or backend in its labels exists from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from grpc import StatusCode
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.daemon.wire import DaemonStatus
from controller.requests import Status

VERBS = (
    "lookup_prefix",
    "prefetch",
    "wait_prefetch",
    "cancel_prefetch",
    "load",
    "backup",
    "release_lease",
    "close_session",
)
COUNTED_CODES = (
    StatusCode.OK,
    StatusCode.CANCELLED,
    StatusCode.INVALID_ARGUMENT,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.NOT_FOUND,
    StatusCode.RESOURCE_EXHAUSTED,
    StatusCode.ABORTED,
    StatusCode.UNAVAILABLE,
    StatusCode.INTERNAL,
)
_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


class RequestMetrics:
    """How many requests ended how, and how long the daemon took to answer them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = Counter(
            "hicache_requests",
            "Requests answered, by verb and gRPC code",
            ["verb", "code"],
            registry=registry,
        )
        seconds = Histogram(
            "hicache_request_seconds",
            "Time from a request's arrival to its answer, by verb",
            ["verb"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._requests = {
            (verb, code): requests.labels(verb, code.name) for verb in VERBS for code in COUNTED_CODES
        }
        self._seconds = {verb: seconds.labels(verb) for verb in VERBS}

    def observe(self, verb: str, code: StatusCode, took_s: float) -> None:
        self._requests[verb, code].inc()
        self._seconds[verb].observe(took_s)


class StatusCollector(Collector):
    """Everything that a status snapshot tells."""

    def __init__(self, snapshot: Callable[[], DaemonStatus]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        daemon = self._snapshot()
        yield from _of_daemon(daemon)
        yield from _of_pools(daemon.controller)
        yield from _of_backends(daemon.controller)

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: the registry need not ask for a snapshot before the daemon stands."""
        return ()


def make_registry() -> CollectorRegistry:
    """A registry of our own, with the process's own figures."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def _of_daemon(daemon: DaemonStatus) -> Iterator[Metric]:
    yield InfoMetricFamily(
        "hicache_daemon", "This daemon", {"version": daemon.version, "boot_id": daemon.boot_id}
    )
    yield _gauge("hicache_ready", "1 when requests are served", float(daemon.ready))
    yield _gauge("hicache_uptime_seconds", "Time since the start", daemon.uptime_s)
    yield _gauge(
        "hicache_problems", "Reasons why health is degraded; 0 when all is well", len(daemon.problems)
    )
    yield _gauge("hicache_engines", "Engines attached", len(daemon.controller.engines))
    yield _gauge("hicache_sessions", "Sessions open", daemon.controller.open_sessions)
    status = daemon.controller
    yield _gauge("hicache_host_used_bytes", "Host memory that belongs to components", status.host_used_bytes)
    yield _gauge("hicache_host_capacity_bytes", "Host memory for frames", status.host_capacity_bytes)
    for name, value in sorted(daemon.counters.items()):
        yield CounterMetricFamily(
            f"hicache_{name}", f"{name.replace('_', ' ')}, since the start", value=value
        )


def _of_pools(status: Status) -> Iterator[Metric]:
    labels = ["model", "component"]
    families = {
        "resident_pages": GaugeMetricFamily(
            "hicache_pool_resident_pages", "Pages in host memory", labels=labels
        ),
        "inbound_pages": GaugeMetricFamily(
            "hicache_pool_inbound_pages", "Pages on their way in", labels=labels
        ),
        "pinned_pages": GaugeMetricFamily(
            "hicache_pool_pinned_pages", "Pages that are pinned", labels=labels
        ),
        "stored_pages": GaugeMetricFamily(
            "hicache_pool_stored_pages", "Pages known in storage", labels=labels
        ),
        "frame_bytes": GaugeMetricFamily(
            "hicache_pool_frame_bytes", "Size of one page's frame", labels=labels
        ),
    }
    for pool in status.pools:
        _add(families, [pool.model, pool.component], vars(pool))
    yield from families.values()


def _of_backends(status: Status) -> Iterator[Metric]:
    labels = ["backend", "kind"]
    families = {
        "healthy": GaugeMetricFamily(
            "hicache_backend_healthy", "1 when the backend can be used", labels=labels
        ),
        "n_objects": GaugeMetricFamily("hicache_backend_objects", "Objects held", labels=labels),
        "used_bytes": GaugeMetricFamily("hicache_backend_used_bytes", "Bytes held", labels=labels),
        "capacity_bytes": GaugeMetricFamily(
            "hicache_backend_capacity_bytes", "Most bytes held; 0 when it cannot tell", labels=labels
        ),
        "queued_bytes": GaugeMetricFamily(
            "hicache_backend_queued_bytes", "Bytes waiting to be written", labels=labels
        ),
        "queued_writes": GaugeMetricFamily("hicache_backend_queued_writes", "Frames waiting", labels=labels),
    }
    for backend in status.backends:
        _add(families, [backend.name, backend.kind], vars(backend))
    yield from families.values()


def _add(families: Mapping[str, GaugeMetricFamily], labels: list[str], values: Mapping[str, object]) -> None:
    for name, family in families.items():
        value = values[name]
        assert isinstance(value, int)
        family.add_metric(labels, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
