"""The tests of sig-network that do not run, and why.

Upstream's jobs that test kube-proxy on clusters of kind skip most of them, too.
"""

from collections.abc import Mapping

_ALWAYS: Mapping[str, str] = {
    r"\[Alpha\]|\[Beta\]|\[Feature:OffByDefault\]": "features that are not stable",
    r"\[Disruptive\]|\[Serial\]": "cannot run beside others",
    r"\[Flaky\]": "upstream knows that they fail at times",
    r"LoadBalancer": "needs a cloud that assigns addresses",
    r"\[Feature:Networking-IPv6\]": "needs the IPv6 internet",
    r"\[Feature:NetworkPolicy": "tests the network plugin",
    r"\[Feature:SCTPConnectivity\]": "needs the module sctp on the machine of the cluster",
    r"\[Feature:KubeProxyDaemonSet": "replaces kube-proxy",
}
_NO_NFACCT = {"KubeProxyNFAcct": "only mode iptables counts with nfacct"}
_NO_LOOPBACK = {"LocalhostNodePorts": "NodePorts do not answer on 127.0.0.1 (docs/dataplanes/README.md)"}
_BY_MODE: Mapping[str, Mapping[str, str]] = {
    "ebpf": _NO_NFACCT,
    "nftables": {**_NO_NFACCT, **_NO_LOOPBACK},
    "ipvs": {
        **_NO_NFACCT,
        **_NO_LOOPBACK,
        "session.affinity.timeout": "upstream skips it in mode ipvs, because of the timers of IPVS",
    },
    "userspace": _NO_NFACCT,
}
_BY_FAMILIES: Mapping[str, Mapping[str, str]] = {
    "ipv4": {r"\[Feature:IPv6DualStack": "the cluster has IPv4 only"},
}


def skips(mode: str, families: str) -> Mapping[str, str]:
    """Regular expressions of Go for the names of tests, each with the reason."""
    return {**_ALWAYS, **_BY_MODE.get(mode, {}), **_BY_FAMILIES.get(families, {})}
