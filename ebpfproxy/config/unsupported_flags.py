"""Flags and fields of kube-proxy that ebpfproxy does not have, and what to do about each.

The lists are those of kube-proxy 1.29 to 1.37: AddFlags in cmd/kube-proxy/app/options.go with the flags of
logging (k8s.io/component-base/logs/api/v1), klog and cadvisor; types.go of k8s.io/kube-proxy/config/v1alpha1.
"""

_REMOVED = "leave it out: kube-proxy itself has removed this flag"

_REMOVED_FLAGS = "cleanup-ipvs resource-container"
_VALUE_FLAGS = (
    "boot-id-file config-sync-period kube-api-burst kube-api-content-type kube-api-qps "
    "log-backtrace-at log-dir log-file log-file-max-size log-flush-frequency log-json-info-buffer-size "
    "log-text-info-buffer-size machine-id-file proxy-port-range show-hidden-metrics-for-version "
    "stderrthreshold vmodule"
)
_BOOLEAN_FLAGS = (
    "add-dir-header alsologtostderr log-json-split-stream log-text-split-stream logtostderr one-output "
    "skip-headers skip-log-headers"
)
_FIELDS_WITHOUT_EFFECT = (
    "clientConnection.acceptContentTypes clientConnection.burst clientConnection.contentType "
    "clientConnection.qps configSyncPeriod iptables.snatNodeInternalIP "
    "logging.flushFrequency logging.options logging.vmodule portRange showHiddenMetricsForVersion "
    "windowsRunAsService "
    "winkernel.enableDSR winkernel.forwardHealthCheckVip winkernel.networkName "
    "winkernel.rootHnsEndpointName winkernel.sourceVip"
)

HINTS: dict[str, str] = {f"--{name}": _REMOVED for name in _REMOVED_FLAGS.split()}
"""The hint of the error for each flag that is an error."""

WITHOUT_EFFECT: dict[str, bool] = {
    **{f"--{name}": False for name in _VALUE_FLAGS.split()},
    **{f"--{name}": True for name in _BOOLEAN_FLAGS.split()},
}
"""The flags that are accepted without effect: whether each is boolean, that is, may lack a value. One warning
names those that are given."""

FIELDS: frozenset[str] = frozenset(_FIELDS_WITHOUT_EFFECT.split())
"""Fields of a KubeProxyConfiguration without effect. One warning names those that are set."""
