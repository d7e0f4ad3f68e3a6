"""Options of kube-proxy that ebpfproxy has not, and what to do about each."""

_NOTHING = "kube-proxy has it, but here it would change nothing: leave it out"
_CLIENT = "kube-proxy has it; how the API server is asked cannot be tuned here: leave it out"
_ALWAYS = "kube-proxy has it; ebpfproxy needs its privileges for as long as it runs: leave it out"
_PREVIOUS = "kube-proxy had it in previous versions: leave it out"

_OF_PREVIOUS_TIMES = (
    "add-dir-header alsologtostderr log-backtrace-at log-dir log-file log-file-max-size logtostderr "
    "one-output resource-container skip-headers skip-log-headers stderrthreshold udp-timeout"
)
_OF_NOTHING = (
    "boot-id-file config-sync-period feature-gates log-flush-frequency log-json-info-buffer-size "
    "log-json-split-stream log-text-info-buffer-size log-text-split-stream machine-id-file profiling "
    "proxy-port-range show-hidden-metrics-for-version vmodule"
)
_WITHOUT_EFFECT = (
    "clientConnection.acceptContentTypes clientConnection.burst clientConnection.contentType "
    "clientConnection.qps configSyncPeriod enableProfiling featureGates iptables.snatNodeInternalIP "
    "logging.flushFrequency logging.options logging.vmodule portRange showHiddenMetricsForVersion "
    "udpIdleTimeout windowsRunAsService "
    "winkernel.enableDSR winkernel.forwardHealthCheckVip winkernel.networkName "
    "winkernel.rootHnsEndpointName winkernel.sourceVip"
)

HINTS: dict[str, str] = {
    **{f"--{name}": _NOTHING for name in _OF_NOTHING.split()},
    **{f"--kube-api-{name}": _CLIENT for name in ("burst", "content-type", "qps")},
    **{f"--{name}": _PREVIOUS for name in _OF_PREVIOUS_TIMES.split()},
    "--init-only": _ALWAYS,
    "--version": "ebpfproxy version shows it",
}
"""By flag: what to do about it."""

FIELDS: frozenset[str] = frozenset(_WITHOUT_EFFECT.split())
"""Fields of a KubeProxyConfiguration without effect. One warning names those that are set."""
