"""Metrics of the requests to the API server, with the names, labels and buckets of Kubernetes' client-go.

The source is k8s.io/component-base/metrics/prometheus/restclient/metrics.go. The agent has no client-side
rate limit, so its latency is 0. It has no exec plugin of its own, no cache of transports, and no goroutines
that renew certificates, so it has no metrics of these.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Seconds."""

SIZE_BUCKETS = (64, 256, 512, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216)
"""Bytes."""


class RestClientMetrics:
    """The metrics, in `registry`. Any thread may call the methods. `host` is the server's name and port."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_verb = ("verb", "host")
        self._requests = Counter(
            "rest_client_requests_total",
            "Number of HTTP requests, partitioned by status code, method, and host.",
            ("code", "method", "host"),
            registry=registry,
        )
        self._seconds = Histogram(
            "rest_client_request_duration_seconds",
            "Request latency in seconds. Broken down by verb, and host.",
            by_verb,
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._limiter_seconds = Histogram(
            "rest_client_rate_limiter_duration_seconds",
            "Client side rate limiter latency in seconds. Broken down by verb, and host.",
            by_verb,
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._transports = Counter(
            "rest_client_transport_create_calls_total",
            "Number of transports created. The agent caches none: the result is uncacheable.",
            ("result",),
            registry=registry,
        )
        Gauge(
            "rest_client_transport_cache_entries",
            "Number of transport entries in the internal cache: none.",
            registry=registry,
        )
        self._request_bytes = Histogram(
            "rest_client_request_size_bytes",
            "Request size in bytes. Broken down by verb and host.",
            by_verb,
            buckets=SIZE_BUCKETS,
            registry=registry,
        )
        self._response_bytes = Histogram(
            "rest_client_response_size_bytes",
            "Response size in bytes. Broken down by verb and host.",
            by_verb,
            buckets=SIZE_BUCKETS,
            registry=registry,
        )

    def transport_created(self) -> None:
        """Count a connection pool."""
        self._transports.labels("uncacheable").inc()

    def requested(self, method: str, host: str, code: int | None) -> None:
        """Count a request that was answered with a status; None if it was not answered."""
        self._requests.labels("<error>" if code is None else str(code), method, host).inc()
        self._limiter_seconds.labels(method, host).observe(0)

    def completed(self, method: str, host: str, seconds: float, sent: int, received: int) -> None:
        """Record a request whose answer has an end, unlike a watch, and the bytes of both bodies."""
        self._seconds.labels(method, host).observe(seconds)
        if sent:
            self._request_bytes.labels(method, host).observe(sent)
        self._response_bytes.labels(method, host).observe(received)
