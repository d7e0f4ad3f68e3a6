"""The names of chains, as kube-proxy gives them in its modes iptables and ipvs; debug scripts rely on them.

Those that both modes have hold other rules in each.
"""

SERVICES = "KUBE-SERVICES"
POSTROUTING = "KUBE-POSTROUTING"
MARK_MASQ = "KUBE-MARK-MASQ"
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"

# Of the mode iptables alone (pkg/proxy/iptables/proxier.go):
EXTERNAL_SERVICES = "KUBE-EXTERNAL-SERVICES"
NODE_PORTS = "KUBE-NODEPORTS"
FIREWALL = "KUBE-FIREWALL"
"""The kubelet writes in this one, too, and jumps to it."""
CANARY = "KUBE-PROXY-CANARY"

CLUSTER, LOCAL, EXTERNAL, SOURCES, ENDPOINT = (
    "KUBE-SVC-",
    "KUBE-SVL-",
    "KUBE-EXT-",
    "KUBE-FW-",
    "KUBE-SEP-",
)

SERVICE_PREFIXES = (CLUSTER, LOCAL, EXTERNAL, SOURCES, ENDPOINT, "KUBE-XLB-")
"""How the names of chains of a Service begin; the last one is of kube-proxy before 1.24, and not written."""

# Of the mode ipvs alone (pkg/proxy/ipvs/proxier.go):
LOAD_BALANCER = "KUBE-LOAD-BALANCER"
NODE_PORT = "KUBE-NODE-PORT"
SOURCE_RANGES_FIREWALL = "KUBE-SOURCE-RANGES-FIREWALL"
IPVS_FILTER = "KUBE-IPVS-FILTER"
IPVS_OUT_FILTER = "KUBE-IPVS-OUT-FILTER"
IPVS_POSTROUTING = "KUBE-IPVS-POSTROUTING"  # not kube-proxy's
