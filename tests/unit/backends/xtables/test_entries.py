"""Rules, and the names of things, as text."""

import pytest

from ebpfproxy.backends.xtables.entries import FILTER, NAT, Chain, Rule, SharedChain, canonical
from ebpfproxy.model.address import Family

V4 = Family.IPV4


@pytest.mark.parametrize(
    ("printed", "meant"),
    [
        ("-j KUBE-SERVICES ", "-j KUBE-SERVICES"),
        ('-m comment --comment "a  b " -j X', '-m comment --comment "a  b " -j X'),
        (r'-m comment --comment "a \"  b"  -j X', r'-m comment --comment "a \"  b" -j X'),
        ('-m comment --comment "ends in quotes "', '-m comment --comment "ends in quotes "'),
    ],
)
def test_blanks_mean_nothing_but_in_quotes(printed: str, meant: str) -> None:
    assert canonical(printed) == meant


def test_what_the_log_names_tells_where_it_is() -> None:
    assert str(Chain(V4, NAT, "KUBE-MARK-MASQ")) == "KUBE-MARK-MASQ (nat, IPv4)"
    assert str(SharedChain(V4, NAT, "KUBE-SERVICES")) == "KUBE-SERVICES (nat, IPv4)"
    assert str(Rule(V4, FILTER, "INPUT", "-j KUBE-FIREWALL")) == "-A INPUT -j KUBE-FIREWALL (filter, IPv4)"
