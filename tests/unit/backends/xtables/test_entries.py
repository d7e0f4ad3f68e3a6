"""The text of rules and keys."""

import pytest

from ebpfproxy.backends.xtables.entries import FILTER, NAT, Chain, Rule, SharedChain, canonical
from ebpfproxy.model.address import Family

V4 = Family.IPV4


@pytest.mark.parametrize(
    ("printed", "canonical_text"),
    [
        ("-j KUBE-SERVICES ", "-j KUBE-SERVICES"),
        ('-m comment --comment "a  b " -j X', '-m comment --comment "a  b " -j X'),
        (r'-m comment --comment "a \"  b"  -j X', r'-m comment --comment "a \"  b" -j X'),
        ('-m comment --comment "ends in quotes "', '-m comment --comment "ends in quotes "'),
    ],
)
def test_blanks_matter_only_within_quotes(printed: str, canonical_text: str) -> None:
    assert canonical(printed) == canonical_text


def test_the_text_of_a_key_contains_table_and_family() -> None:
    assert str(Chain(V4, NAT, "KUBE-MARK-MASQ")) == "KUBE-MARK-MASQ (nat, IPv4)"
    assert str(SharedChain(V4, NAT, "KUBE-SERVICES")) == "KUBE-SERVICES (nat, IPv4)"
    assert str(Rule(V4, FILTER, "INPUT", "-j KUBE-FIREWALL")) == "-A INPUT -j KUBE-FIREWALL (filter, IPv4)"
