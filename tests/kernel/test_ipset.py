"""Sets created, filled and read in a separate namespace, compared with ipset(8)."""

import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ipvs.entries import Member, Set
from ebpfproxy.backends.ipvs.ip_sets import IpSets
from ebpfproxy.backends.ipvs.node_port_expansion import NodePortExpansion
from ebpfproxy.errors import AlreadyExists, NotFound, Rejected, TableFull, Unsupported
from ebpfproxy.linux.ipset import ipset
from ebpfproxy.linux.ipset.ipset import Change
from ebpfproxy.linux.ipset.messages import IpSet, Listed
from ebpfproxy.model.address import Family
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

WEB = IpSet("WEB", "hash:ip,port", Family.IPV4)
PORTS = IpSet("PORTS", "bitmap:port", None, 0)


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace("ipset") as ip_set, ip_set.entered():
        try:
            ipset.available()
        except Unsupported as unsupported:
            pytest.skip(unsupported.message)
        yield ip_set


def tool(*arguments: str) -> list[str]:
    """The lines that ipset(8) prints in the calling thread's network namespace."""
    done = subprocess.run(["ipset", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def shown(name: str) -> set[str]:
    prefix = f"add {name} "
    return {line.removeprefix(prefix) for line in tool("save", name) if line.startswith(prefix)}


CONTENTS = {
    IpSet("IP", "hash:ip", Family.IPV4): {"10.0.0.1", "10.255.0.2"},
    IpSet("IP6", "hash:ip", Family.IPV6): {"fd00::1", "2001:db8::1:2"},
    WEB: {"10.0.0.1,tcp:80", "10.0.0.1,udp:53", "10.0.0.1,sctp:258", "10.0.0.1,tcp:65535"},
    IpSet("WEB6", "hash:ip,port", Family.IPV6): {"fd00::1,tcp:80", "fd00::1,udp:53", "fd00::1,sctp:9"},
    IpSet("HAIRPIN", "hash:ip,port,ip", Family.IPV4): {"10.0.0.1,tcp:80,10.0.0.2", "10.0.0.1,udp:1,10.0.0.1"},
    IpSet("HAIRPIN6", "hash:ip,port,ip", Family.IPV6): {"fd00::1,tcp:80,fd00::2", "fd00::1,sctp:1,fd00::1"},
    IpSet("FROM", "hash:ip,port,net", Family.IPV4): {
        "10.0.0.1,tcp:80,10.0.0.0/8",
        "10.0.0.1,tcp:80,192.0.2.1",
        "10.0.0.1,udp:53,128.0.0.0/1",
    },
    IpSet("FROM6", "hash:ip,port,net", Family.IPV6): {
        "fd00::1,tcp:80,2001:db8::/32",
        "fd00::1,sctp:80,2001:db8::1",
    },
    PORTS: {"0", "30080", "65535"},
}


@pytest.mark.parametrize("ip_set", CONTENTS, ids=lambda ip_set: ip_set.name)
def test_written_members_are_read_back_and_shown_by_ipset(node: Namespace, ip_set: IpSet) -> None:
    wanted = CONTENTS[ip_set]
    assert ipset.replace({ip_set: wanted}) == {}
    assert ipset.members(ip_set.name) == shown(ip_set.name) == wanted
    assert ipset.sets() == {ip_set.name: Listed(ip_set, len(wanted), 0)}


@pytest.mark.parametrize("ip_set", CONTENTS, ids=lambda ip_set: ip_set.name)
def test_members_added_by_ipset_are_read_and_dropped(node: Namespace, ip_set: IpSet) -> None:
    wanted = CONTENTS[ip_set]
    ipset.create(ip_set)
    for member in wanted:
        tool("add", ip_set.name, member)
    assert ipset.members(ip_set.name) == wanted
    assert ipset.change([Change(ip_set, drop=wanted)]) == {}
    assert ipset.members(ip_set.name) == frozenset()


def test_a_namespace_without_sets_lists_none(node: Namespace) -> None:
    assert ipset.sets() == {}


def test_many_sets_are_replaced_at_once_without_temporary_sets(node: Namespace) -> None:
    assert ipset.replace(CONTENTS) == {}
    assert set(ipset.sets()) == {ip_set.name for ip_set in CONTENTS}
    assert {ip_set.name: ipset.members(ip_set.name) for ip_set in CONTENTS} == {
        ip_set.name: members for ip_set, members in CONTENTS.items()
    }


def test_a_set_is_replaced_atomically_while_a_rule_refers_to_it(node: Namespace) -> None:
    ipset.replace({WEB: ["10.0.0.1,tcp:80", "10.0.0.2,tcp:80"]})
    rule = ["-m", "set", "--match-set", "WEB", "dst,dst", "-j", "DROP"]
    subprocess.run(["iptables-legacy", "-w", "-A", "OUTPUT", *rule], check=True)
    assert ipset.sets()["WEB"].references == 1
    assert ipset.replace({WEB._replace(max_elements=7): ["10.0.0.3,tcp:80"]}) == {}
    assert ipset.sets() == {"WEB": Listed(WEB._replace(max_elements=7), 1, 1)}
    assert ipset.members("WEB") == {"10.0.0.3,tcp:80"}
    with pytest.raises(Rejected, match="a rule"):
        ipset.destroy("WEB")
    subprocess.run(["iptables-legacy", "-w", "-D", "OUTPUT", *rule], check=True)
    ipset.destroy("WEB")
    assert ipset.sets() == {}


def test_a_temporary_set_of_a_killed_run_is_replaced(node: Namespace) -> None:
    tool("create", ipset.TEMPORARY, "hash:ip")
    assert ipset.replace({WEB: ["10.0.0.1,tcp:80"]}) == {}
    assert set(ipset.sets()) == {"WEB"}


def test_adding_existing_and_dropping_missing_entries_is_no_error(node: Namespace) -> None:
    ipset.replace({WEB: ["10.0.0.1,tcp:80"], PORTS: ["1"]})
    changes = [Change(WEB, ["10.0.0.1,tcp:80"], ["10.0.0.9,tcp:80"]), Change(PORTS, ["1"], ["2"])]
    assert ipset.change(changes) == {}
    assert ipset.members("WEB") == {"10.0.0.1,tcp:80"}
    assert ipset.members("PORTS") == {"1"}


def test_invalid_members_are_rejected_by_name_and_the_others_added(node: Namespace) -> None:
    bad = ["10.0.0.1", "10.0.0.1,tcp:99999", "fd00::1,tcp:80", "10.0.0.1,pigeon:80", "10.0.0.300,tcp:80", ""]
    rejections = ipset.replace({WEB: [*bad, "10.0.0.1,tcp:80"], PORTS: ["65536", "a", "8"]})
    assert set(rejections) == {("WEB", member) for member in bad} | {("PORTS", "65536"), ("PORTS", "a")}
    assert all(isinstance(error, Rejected) for error in rejections.values())
    assert ipset.members("WEB") == {"10.0.0.1,tcp:80"}
    assert ipset.members("PORTS") == {"8"}


def test_a_network_of_length_0_is_rejected_by_the_kernel(node: Namespace) -> None:
    """hash:net cannot hold a /0. Callers add the two /1 networks."""
    ip_set = IpSet("FROM", "hash:ip,port,net", Family.IPV4)
    whole = "10.0.0.1,tcp:80,0.0.0.0/0"
    rejections = ipset.replace({ip_set: [whole, "10.0.0.1,tcp:80,0.0.0.0/1"]})
    assert set(rejections) == {("FROM", whole)}
    assert "prefix length of 0" in rejections["FROM", whole].message
    assert ipset.members("FROM") == {"10.0.0.1,tcp:80,0.0.0.0/1"}


def test_members_beyond_the_maximum_are_rejected_individually(node: Namespace) -> None:
    wanted = [f"10.0.{number // 256}.{number % 256},tcp:80" for number in range(300)]
    rejections = ipset.replace({WEB._replace(max_elements=100): wanted})
    assert len(rejections) == 200
    assert all(isinstance(error, TableFull) for error in rejections.values())
    held = ipset.members("WEB")
    assert held == set(wanted) - {member for _, member in rejections}
    assert len(held) == 100
    some = sorted(held)[:2]
    rejected = sorted(member for _, member in rejections)[0]
    assert ipset.change([Change(WEB, add=[rejected], drop=some)]) == {}


def test_an_existing_set_of_another_type_is_rejected_and_not_changed(node: Namespace) -> None:
    ipset.replace({WEB._replace(type="hash:ip"): ["10.0.0.7"]})
    rejections = ipset.replace({WEB: ["10.0.0.1,tcp:80", "nonsense"], PORTS: ["1"]})
    assert isinstance(rejections["WEB", ""], AlreadyExists)
    assert ipset.members("WEB") == {"10.0.0.7"}
    assert ipset.members("PORTS") == {"1"}
    assert set(ipset.sets()) == {"WEB", "PORTS"}


def test_members_of_a_missing_set_are_rejected_with_not_found(node: Namespace) -> None:
    rejections = ipset.change([Change(WEB, ["10.0.0.1,tcp:80"])])
    assert isinstance(rejections["WEB", "10.0.0.1,tcp:80"], NotFound)


def test_a_missing_or_existing_set_raises_the_specific_error(node: Namespace) -> None:
    ipset.create(WEB)
    with pytest.raises(AlreadyExists, match="WEB"):
        ipset.create(WEB)
    with pytest.raises(NotFound, match="GONE"):
        ipset.members("GONE")
    with pytest.raises(NotFound, match="GONE"):
        ipset.destroy("GONE")


def test_destroying_the_empty_name_destroys_nothing(node: Namespace) -> None:
    """For the kernel, an empty name means all sets."""
    ipset.create(WEB)
    with pytest.raises(Rejected):
        ipset.destroy("")
    assert set(ipset.sets()) == {"WEB"}


def test_a_foreign_set_of_an_unknown_type_is_listed_but_not_read(node: Namespace) -> None:
    tool("create", "nets", "hash:net")
    tool("add", "nets", "10.0.0.0/8")
    assert ipset.sets()["nets"].set.type == "hash:net"
    with pytest.raises(Unsupported, match="hash:net"):
        ipset.members("nets")


def test_a_foreign_set_with_comments_and_timeouts_is_read(node: Namespace) -> None:
    tool("create", "WEB", "hash:ip,port", "comment", "timeout", "1000", "counters")
    tool("add", "WEB", "10.0.0.1,tcp:80", "comment", "foreign")
    assert ipset.members("WEB") == {"10.0.0.1,tcp:80"}


def test_the_fingerprint_changes_only_with_members_and_sets(node: Namespace) -> None:
    ipset.replace({WEB: ["10.0.0.1,tcp:80"], PORTS: ["1"]})
    names = ["WEB", "PORTS", "GONE"]
    first = ipset.fingerprint(names)
    tool("create", "other", "hash:ip")
    rule = ["-m", "set", "--match-set", "WEB", "dst,dst", "-j", "DROP"]
    subprocess.run(["iptables-legacy", "-w", "-A", "OUTPUT", *rule], check=True)
    assert ipset.fingerprint(names) == first
    tool("add", "WEB", "10.0.0.2,tcp:80")
    second = ipset.fingerprint(names)
    tool("del", "WEB", "10.0.0.1,tcp:80")
    tool("add", "WEB", "10.0.0.3,tcp:80")
    third = ipset.fingerprint(names)
    tool("add", "PORTS", "2")
    fourth = ipset.fingerprint(names)
    tool("create", "GONE", "hash:ip")
    assert len({first, second, third, fourth, ipset.fingerprint(names)}) == 5


def test_tens_of_thousands_of_members_are_written_and_read(node: Namespace) -> None:
    wanted = {f"10.{number >> 8}.{number & 255}.1,tcp:80" for number in range(30_000)}
    assert ipset.replace({WEB: wanted}) == {}
    assert ipset.members("WEB") == wanted
    assert ipset.change([Change(WEB, drop=wanted)]) == {}
    assert ipset.members("WEB") == frozenset()


# The sets of mode ipvs


@pytest.mark.parametrize(
    ("command", "member", "existing"),
    [
        ("hash:ip,port,ip family inet", "10.0.0.1,tcp:80,10.0.0.1", "hash:ip,port,ip of IPv4"),
        ("hash:ip,port family inet6", "fd00::1,tcp:80", "hash:ip,port of IPv6"),
        ("bitmap:port range 0-65535", "80", "bitmap:port"),
        ("hash:net family inet", "10.0.0.0/8", "hash:net of IPv4"),
    ],
)
def test_a_kube_set_of_another_type_is_rejected_with_a_hint(
    node: Namespace, command: str, member: str, existing: str
) -> None:
    tool("create", "KUBE-CLUSTER-IP", *command.split())
    tool("add", "KUBE-CLUSTER-IP", member)
    sets, key = IpSets(), Set(Family.IPV4, "KUBE-CLUSTER-IP")
    assert sets.read(Family) == {key: False}
    rejection = sets.create([key])[key]
    assert rejection.message.endswith(f"it exists as {existing}, not hash:ip,port of IPv4")
    assert "ipset destroy KUBE-CLUSTER-IP" in rejection.hint
    assert sets.change([Member(*key, "10.0.0.2,tcp:80")], ())


def test_a_member_with_a_protocol_that_services_cannot_have_is_removed(node: Namespace) -> None:
    sets, key = IpSets(), Set(Family.IPV4, "KUBE-CLUSTER-IP")
    assert not sets.create([key])
    tool("add", "KUBE-CLUSTER-IP", "10.0.0.1,udplite:80")
    product = NodePortExpansion()
    found = product.collapse(sets.read(Family))
    change = product.expand(diff(found, {key: found[key]}))
    assert not sets.change((), (each for each in change.drops if isinstance(each, Member)))
    assert shown("KUBE-CLUSTER-IP") == set()
