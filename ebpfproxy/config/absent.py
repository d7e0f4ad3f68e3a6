"""Flags that kube-proxy has and we have not, so that whoever brings its arguments learns what to do."""

_NOTHING = "kube-proxy has it, but here it would change nothing: leave it out"
_LATER = "kube-proxy has it, but it belongs to a proxy mode that this version has not: leave it out"
_CLIENT = "kube-proxy has it; how the API server is asked cannot be tuned here: leave it out"

_OF_NOTHING = (
    "boot-id-file cluster-cidr config-sync-period conntrack-max-per-core conntrack-min "
    "conntrack-tcp-be-liberal detect-local-mode feature-gates init-only log-flush-frequency "
    "log-json-info-buffer-size log-json-split-stream log-text-info-buffer-size log-text-split-stream "
    "machine-id-file pod-bridge-interface pod-interface-name-prefix profiling proxy-port-range "
    "show-hidden-metrics-for-version vmodule"
)
_OF_OTHER_MODES = (
    "iptables-masquerade-bit ipvs-exclude-cidrs ipvs-scheduler ipvs-strict-arp ipvs-tcp-timeout "
    "ipvs-tcpfin-timeout ipvs-udp-timeout"
)

HINTS: dict[str, str] = {
    **{f"--{name}": _NOTHING for name in _OF_NOTHING.split()},
    **{f"--{name}": _LATER for name in _OF_OTHER_MODES.split()},
    **{f"--kube-api-{name}": _CLIENT for name in ("burst", "content-type", "qps")},
    **{f"--{mode}-sync-period": "here it is --sync-period, for every mode" for mode in ("iptables", "ipvs")},
    **{
        f"--{mode}-min-sync-period": "here it is --min-sync-period, for every mode"
        for mode in ("iptables", "ipvs")
    },
    "--config": "the file KubeProxyConfiguration is not read by this version: give its settings as flags",
    "--write-config-to": "the file KubeProxyConfiguration is not written by this version",
}
