"""The chains that the cleanup of mode ipvs removes."""

from ebpfproxy.backends.iptables import cleanup as removal_of_iptables
from ebpfproxy.backends.iptables.entries import NAT, Chain, Rule, SharedChain
from ebpfproxy.backends.ipvs import cleanup
from ebpfproxy.backends.ipvs.entries import LAYOUT, IpvsSettings
from ebpfproxy.backends.ipvs.node_entries import node_entries
from ebpfproxy.backends.ipvs.sets import NAMES
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan

OURS: dict[tuple[str, str], list[str]] = {
    (key.table, key.name): [str(rule) for rule in entry] if isinstance(entry, tuple) else []
    for key, entry in node_entries(NodePlan(), Family.IPV4, IpvsSettings()).items()
    if isinstance(key, Chain | SharedChain)
}
OF_A_SERVICE = (NAT, "KUBE-SVC-XPGD46QRK7WJZT7O")
IPTABLES: dict[tuple[str, str], list[str]] = {
    (NAT, "KUBE-SERVICES"): ["-j KUBE-NODEPORTS"],
    (NAT, "KUBE-MARK-MASQ"): [],
    OF_A_SERVICE: [],
}


def test_cleanup_of_mode_iptables_keeps_the_chains_of_mode_ipvs_that_serves() -> None:
    chains = OURS | {OF_A_SERVICE: []}
    assert removal_of_iptables.leftovers(chains) == {OF_A_SERVICE}
    assert cleanup.leftovers(chains) == OURS.keys()


def test_cleanup_of_mode_ipvs_keeps_the_chains_of_mode_iptables_that_serves() -> None:
    chains = (
        OURS | IPTABLES | {key: [] for key in OURS if key[1] in ("KUBE-POSTROUTING", "KUBE-PROXY-FIREWALL")}
    )
    assert cleanup.leftovers(chains).isdisjoint(IPTABLES)
    assert (NAT, "KUBE-LOAD-BALANCER") in cleanup.leftovers(chains)


def test_entries_of_the_node_are_recognized_as_own() -> None:
    for key in node_entries(NodePlan(), Family.IPV6, IpvsSettings()):
        if isinstance(key, Chain | SharedChain):
            assert LAYOUT.chain_key(key.family, key.table, key.name) == key
        elif isinstance(key, Rule):
            assert LAYOUT.is_own(key)


def test_set_names_are_unique_and_not_too_long() -> None:
    assert len(NAMES) == 42
    assert max(map(len, NAMES)) <= 31
