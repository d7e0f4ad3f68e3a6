"""Each link of `ebpfproxy doctor` leads to a heading of the documentation."""

import pytest

from ebpfproxy.backends.ebpf import probes
from ebpfproxy.backends.findings import Finding
from ebpfproxy.diagnose.doctor import modes
from ebpfproxy.diagnose.doctor.check import NODE, State
from ebpfproxy.diagnose.doctor.links import Page
from tests.unit.test_docs import ROOT, anchors


@pytest.mark.parametrize("page", Page, ids=lambda page: page.name)
def test_the_heading_exists(page: Page) -> None:
    file, _, anchor = page.value.partition("#")
    assert anchor in anchors(ROOT / "docs" / file)
    assert page.path == f"docs/{page.value}"


@pytest.mark.parametrize(
    ("subject", "feature", "page"),
    [
        ("ebpf", "bpf(2)", Page.EBPF_START),
        ("ebpf", "first place at ingress of eth0", Page.FIRST_PLACE),
        ("ebpf", "reconnecting other processes' sockets", Page.STALE_SOCKETS),
        ("ebpf", probes.HELPERS["HAVE_REDIRECT_PEER"].name, Page.EBPF_FEATURES),
        ("nftables", "nftables for IPv4", Page.NFTABLES),
        ("iptables", "probing", Page.IPTABLES),
        ("ipvs", "IPVS", Page.IPVS),
        (NODE, "requests by eth1", Page.UPLINKS),
    ],
)
def test_each_feature_has_the_page_that_describes_it(subject: str, feature: str, page: Page) -> None:
    (check,) = modes.checks(subject, [Finding(feature, 1, "it is missing", "do this")])
    assert check.page is page


def test_the_state_says_whether_the_mode_works_without_it() -> None:
    findings = Finding("a"), Finding("b", 1, "none", "do"), Finding("c", 1, "slow", "do", needed=False)
    assert [each.state for each in modes.checks("nftables", findings)] == [
        State.PRESENT,
        State.REQUIRED,
        State.OPTIONAL,
    ]
