"""Flags and fields of kube-proxy that ebpfproxy does not have, and what to do about each."""

_NO_EFFECT = "leave it out: this flag of kube-proxy has no effect in ebpfproxy"
_CLIENT = "leave it out: ebpfproxy has no settings for its requests to the API server"
_PRIVILEGES = "leave it out: ebpfproxy needs its privileges as long as it runs"
_REMOVED = "leave it out: kube-proxy itself has removed this flag"

_REMOVED_FLAGS = (
    "add-dir-header alsologtostderr log-backtrace-at log-dir log-file log-file-max-size logtostderr "
    "one-output resource-container skip-headers skip-log-headers stderrthreshold udp-timeout"
)
_FLAGS_WITHOUT_EFFECT = (
    "boot-id-file config-sync-period feature-gates log-flush-frequency log-json-info-buffer-size "
    "log-json-split-stream log-text-info-buffer-size log-text-split-stream machine-id-file profiling "
    "proxy-port-range show-hidden-metrics-for-version vmodule"
)
_FIELDS_WITHOUT_EFFECT = (
    "clientConnection.acceptContentTypes clientConnection.burst clientConnection.contentType "
    "clientConnection.qps configSyncPeriod enableProfiling featureGates iptables.snatNodeInternalIP "
    "logging.flushFrequency logging.options logging.vmodule portRange showHiddenMetricsForVersion "
    "udpIdleTimeout windowsRunAsService "
    "winkernel.enableDSR winkernel.forwardHealthCheckVip winkernel.networkName "
    "winkernel.rootHnsEndpointName winkernel.sourceVip"
)

HINTS: dict[str, str] = {
    **{f"--{name}": _NO_EFFECT for name in _FLAGS_WITHOUT_EFFECT.split()},
    **{f"--kube-api-{name}": _CLIENT for name in ("burst", "content-type", "qps")},
    **{f"--{name}": _REMOVED for name in _REMOVED_FLAGS.split()},
    "--init-only": _PRIVILEGES,
    "--version": "run ebpfproxy version",
}
"""The hint of the error for each flag."""

FIELDS: frozenset[str] = frozenset(_FIELDS_WITHOUT_EFFECT.split())
"""Fields of a KubeProxyConfiguration without effect. One warning names those that are set."""
