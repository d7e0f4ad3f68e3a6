"""The names of chains, which are those of kube-proxy's modes iptables and ipvs. Debug scripts rely on them.

A chain that both modes have contains different rules in each.
"""

SERVICES = "KUBE-SERVICES"
POSTROUTING = "KUBE-POSTROUTING"
MARK_MASQ = "KUBE-MARK-MASQ"
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"

# Only in mode iptables (pkg/proxy/iptables/proxier.go):
EXTERNAL_SERVICES = "KUBE-EXTERNAL-SERVICES"
NODE_PORTS = "KUBE-NODEPORTS"
FIREWALL = "KUBE-FIREWALL"
"""The kubelet also adds rules to this chain, and jumps to it."""
CANARY = "KUBE-PROXY-CANARY"

CLUSTER, LOCAL, EXTERNAL, SOURCES, ENDPOINT = (
    "KUBE-SVC-",
    "KUBE-SVL-",
    "KUBE-EXT-",
    "KUBE-FW-",
    "KUBE-SEP-",
)

SERVICE_PREFIXES = (CLUSTER, LOCAL, EXTERNAL, SOURCES, ENDPOINT, "KUBE-XLB-")
"""How the names of a Service's chains begin. The last prefix is that of kube-proxy before 1.24, and is never
written.
"""

# Only in mode ipvs (pkg/proxy/ipvs/proxier.go):
LOAD_BALANCER = "KUBE-LOAD-BALANCER"
NODE_PORT = "KUBE-NODE-PORT"
SOURCE_RANGES_FIREWALL = "KUBE-SOURCE-RANGES-FIREWALL"
IPVS_FILTER = "KUBE-IPVS-FILTER"
IPVS_OUT_FILTER = "KUBE-IPVS-OUT-FILTER"
IPVS_POSTROUTING = "KUBE-IPVS-POSTROUTING"  # not kube-proxy's
