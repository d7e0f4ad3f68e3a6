"""What `ebpfproxy doctor` says of a node with two uplinks."""

import itertools
import re

import pytest

from tests.kernel.uplinks import LOOSE, STRICT, Uplinks

pytestmark = [pytest.mark.kernel, pytest.mark.ways("nftables")]

REQUESTS = "requests by eth1"


def doctor(uplinks: Uplinks) -> str:
    return uplinks.ebpfproxy("doctor", check=False).stdout


def state(text: str, feature: str) -> str:
    """What stands in the row of the feature behind its name, which the table may have wrapped."""
    first, *others = re.split(rf"^.*{feature} +", text, flags=re.MULTILINE)[1].splitlines()
    further = itertools.takewhile(lambda line: line.startswith(" " * 30), others)
    return " ".join(" ".join([first, *further]).split())


def test_a_strict_reverse_path_filter_is_explained(uplinks: Uplinks) -> None:
    with uplinks.reverse_path_filter(uplinks.node, STRICT):
        said = doctor(uplinks)
    assert state(said, REQUESTS) == (
        "no the reverse path filter drops IPv4 clients whose replies leave by eth0; "
        "route these clients by eth1, or sysctl -w net.ipv4.conf.eth1.rp_filter=2"
    )
    assert "requests by eth0" not in said
    assert "requests by veth" not in said


def test_a_loose_reverse_path_filter_accepts_all_uplinks(uplinks: Uplinks) -> None:
    with uplinks.reverse_path_filter(uplinks.node, LOOSE):
        assert state(doctor(uplinks), REQUESTS) == "yes"


def test_a_strict_reverse_path_filter_accepts_equal_cost_routes(uplinks: Uplinks) -> None:
    """The route to a client is by one of them at a time; the other one is named, and accepted."""
    with uplinks.reverse_path_filter(uplinks.node, STRICT), uplinks.multipath():
        said = doctor(uplinks)
    assert re.findall(r"requests by eth\d +(\w+)", said) == ["yes"]
