"""Metrics that every component of Kubernetes has: version, feature gates, and results of health checks.

The sources are version.go, prometheus/feature/metrics.go and prometheus/slis/metrics.go of
k8s.io/component-base/metrics.
"""

import os

from prometheus_client import CollectorRegistry, Counter, Gauge

from ebpfproxy import __version__

KUBERNETES = (1, 36, 2)
"""The version of kube-proxy whose behavior the agent has."""

_FEATURES = {"ComponentFlagz": "BETA", "ComponentStatusz": "BETA", "PreferSameTrafficDistribution": ""}
"""The stages in Kubernetes 1.36 of the feature gates whose features the agent has; "" for GA."""

EXTERNAL_IPS = ("AllowServiceExternalIPs", "DEPRECATED")
"""The gate that the configuration sets (KEP-5707), and its stage."""

_PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64"}
"""Go's names of architectures, where they differ from those of the kernel."""


def register(registry: CollectorRegistry) -> Gauge:
    """Add the metrics about version and feature gates; return the latter.

    `git_version` is that of kube-proxy, with the agent's as build metadata (docs/metrics.md has the
    reason). The agent is not compiled, so the labels about a compiler are empty.
    """
    major, minor, _ = KUBERNETES
    release = ".".join(map(str, KUBERNETES))
    machine = os.uname().machine
    labels = {
        "major": str(major),
        "minor": str(minor),
        "git_version": f"v{release}+ebpfproxy.{__version__}",
        "git_commit": "",
        "git_tree_state": "",
        "build_date": "",
        "go_version": "",
        "compiler": "",
        "platform": f"linux/{_PLATFORMS.get(machine, machine)}",
    }
    build = Gauge(
        "kubernetes_build_info",
        "1; the version of Kubernetes whose kube-proxy this agent equals, and the platform",
        tuple(labels),
        registry=registry,
    )
    build.labels(**labels).set(1)
    features = Gauge(
        "kubernetes_feature_enabled",
        "1 for each feature gate of Kubernetes whose feature the agent has, 0 if disabled; no `stage`: GA",
        ("name", "stage"),
        registry=registry,
    )
    for name, stage in _FEATURES.items():
        features.labels(name, stage).set(1)
    return features


class HealthCheckMetrics:
    """The metrics of /metrics/slis (KEP-3466), in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._last = Gauge(
            "kubernetes_healthcheck",
            "1 if the last health check of this name and type succeeded",
            ("name", "type"),
            registry=self.registry,
        )
        self._all = Counter(
            "kubernetes_healthchecks_total",
            "Health checks by result",
            ("name", "type", "status"),
            registry=self.registry,
        )

    def passed(self, name: str, kind: str) -> None:
        """Record a health check that succeeded. `kind` is the page: healthz, livez or readyz."""
        self._last.labels(name, kind).set(1)
        self._all.labels(name, kind, "success").inc()
