"""Sets made, filled and read in a namespace of the test's own, and looked at with ipset(8)."""

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
    with namespace("ipset") as made, made.entered():
        try:
            ipset.available()
        except Unsupported as lack:
            pytest.skip(lack.message)
        yield made


def tool(*arguments: str) -> list[str]:
    """What ipset(8) prints, in the calling thread's network namespace."""
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


@pytest.mark.parametrize("made", CONTENTS, ids=lambda made: made.name)
def test_members_read_back_as_written_and_as_ipset_shows_them(node: Namespace, made: IpSet) -> None:
    wanted = CONTENTS[made]
    assert ipset.replace({made: wanted}) == {}
    assert ipset.members(made.name) == shown(made.name) == wanted
    assert ipset.sets() == {made.name: Listed(made, len(wanted), 0)}


@pytest.mark.parametrize("made", CONTENTS, ids=lambda made: made.name)
def test_members_that_ipset_adds_are_read_and_can_be_dropped(node: Namespace, made: IpSet) -> None:
    wanted = CONTENTS[made]
    ipset.create(made)
    for member in wanted:
        tool("add", made.name, member)
    assert ipset.members(made.name) == wanted
    assert ipset.change([Change(made, drop=wanted)]) == {}
    assert ipset.members(made.name) == frozenset()


def test_a_namespace_without_sets_lists_none(node: Namespace) -> None:
    assert ipset.sets() == {}


def test_many_sets_are_filled_at_once_and_nothing_temporary_stays(node: Namespace) -> None:
    assert ipset.replace(CONTENTS) == {}
    assert set(ipset.sets()) == {made.name for made in CONTENTS}
    assert {made.name: ipset.members(made.name) for made in CONTENTS} == {
        made.name: members for made, members in CONTENTS.items()
    }


def test_a_set_is_replaced_as_a_whole_while_a_rule_refers_to_it(node: Namespace) -> None:
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


def test_what_a_killed_run_left_does_not_hinder_the_next(node: Namespace) -> None:
    tool("create", ipset.TEMPORARY, "hash:ip")
    assert ipset.replace({WEB: ["10.0.0.1,tcp:80"]}) == {}
    assert set(ipset.sets()) == {"WEB"}


def test_to_add_what_is_there_and_to_drop_what_is_not_is_fine(node: Namespace) -> None:
    ipset.replace({WEB: ["10.0.0.1,tcp:80"], PORTS: ["1"]})
    changes = [Change(WEB, ["10.0.0.1,tcp:80"], ["10.0.0.9,tcp:80"]), Change(PORTS, ["1"], ["2"])]
    assert ipset.change(changes) == {}
    assert ipset.members("WEB") == {"10.0.0.1,tcp:80"}
    assert ipset.members("PORTS") == {"1"}


def test_a_member_that_is_none_is_refused_by_name_and_the_others_are_in(node: Namespace) -> None:
    bad = ["10.0.0.1", "10.0.0.1,tcp:99999", "fd00::1,tcp:80", "10.0.0.1,pigeon:80", "10.0.0.300,tcp:80", ""]
    rejections = ipset.replace({WEB: [*bad, "10.0.0.1,tcp:80"], PORTS: ["65536", "a", "8"]})
    assert set(rejections) == {("WEB", member) for member in bad} | {("PORTS", "65536"), ("PORTS", "a")}
    assert all(isinstance(error, Rejected) for error in rejections.values())
    assert ipset.members("WEB") == {"10.0.0.1,tcp:80"}
    assert ipset.members("PORTS") == {"8"}


def test_the_network_of_all_addresses_is_refused_by_the_kernel(node: Namespace) -> None:
    """hash:net cannot hold a /0; whoever wants one gives its two halves."""
    made = IpSet("FROM", "hash:ip,port,net", Family.IPV4)
    whole = "10.0.0.1,tcp:80,0.0.0.0/0"
    rejections = ipset.replace({made: [whole, "10.0.0.1,tcp:80,0.0.0.0/1"]})
    assert set(rejections) == {("FROM", whole)}
    assert "prefix length of 0" in rejections["FROM", whole].message
    assert ipset.members("FROM") == {"10.0.0.1,tcp:80,0.0.0.0/1"}


def test_members_beyond_the_maximum_are_refused_one_by_one(node: Namespace) -> None:
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


def test_a_set_of_another_type_stays_as_it_is_and_is_refused_as_a_whole(node: Namespace) -> None:
    ipset.replace({WEB._replace(type="hash:ip"): ["10.0.0.7"]})
    rejections = ipset.replace({WEB: ["10.0.0.1,tcp:80", "nonsense"], PORTS: ["1"]})
    assert isinstance(rejections["WEB", ""], AlreadyExists)
    assert ipset.members("WEB") == {"10.0.0.7"}
    assert ipset.members("PORTS") == {"1"}
    assert set(ipset.sets()) == {"WEB", "PORTS"}


def test_members_of_a_set_that_there_is_not_are_refused_as_not_found(node: Namespace) -> None:
    rejections = ipset.change([Change(WEB, ["10.0.0.1,tcp:80"])])
    assert isinstance(rejections["WEB", "10.0.0.1,tcp:80"], NotFound)


def test_what_is_missing_or_there_already_is_told(node: Namespace) -> None:
    ipset.create(WEB)
    with pytest.raises(AlreadyExists, match="WEB"):
        ipset.create(WEB)
    with pytest.raises(NotFound, match="GONE"):
        ipset.members("GONE")
    with pytest.raises(NotFound, match="GONE"):
        ipset.destroy("GONE")


def test_no_name_destroys_nothing(node: Namespace) -> None:
    """To the kernel it means all sets."""
    ipset.create(WEB)
    with pytest.raises(Rejected):
        ipset.destroy("")
    assert set(ipset.sets()) == {"WEB"}


def test_a_strangers_set_is_listed_and_its_members_are_not_guessed(node: Namespace) -> None:
    tool("create", "nets", "hash:net")
    tool("add", "nets", "10.0.0.0/8")
    assert ipset.sets()["nets"].set.type == "hash:net"
    with pytest.raises(Unsupported, match="hash:net"):
        ipset.members("nets")


def test_a_strangers_set_with_comments_and_timeouts_is_read(node: Namespace) -> None:
    tool("create", "WEB", "hash:ip,port", "comment", "timeout", "1000", "counters")
    tool("add", "WEB", "10.0.0.1,tcp:80", "comment", "mine")
    assert ipset.members("WEB") == {"10.0.0.1,tcp:80"}


def test_the_fingerprint_changes_with_members_and_with_nothing_else(node: Namespace) -> None:
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


def test_tens_of_thousands_of_members_are_all_written_and_read(node: Namespace) -> None:
    wanted = {f"10.{number >> 8}.{number & 255}.1,tcp:80" for number in range(30_000)}
    assert ipset.replace({WEB: wanted}) == {}
    assert ipset.members("WEB") == wanted
    assert ipset.change([Change(WEB, drop=wanted)]) == {}
    assert ipset.members("WEB") == frozenset()


# What the mode ipvs makes of them


@pytest.mark.parametrize(
    ("command", "member", "there"),
    [
        ("hash:ip,port,ip family inet", "10.0.0.1,tcp:80,10.0.0.1", "hash:ip,port,ip of IPv4"),
        ("hash:ip,port family inet6", "fd00::1,tcp:80", "hash:ip,port of IPv6"),
        ("bitmap:port range 0-65535", "80", "bitmap:port"),
        ("hash:net family inet", "10.0.0.0/8", "hash:net of IPv4"),
    ],
)
def test_a_set_of_another_sort_is_refused_with_a_remedy_and_its_members_are_nobodys(
    node: Namespace, command: str, member: str, there: str
) -> None:
    tool("create", "KUBE-CLUSTER-IP", *command.split())
    tool("add", "KUBE-CLUSTER-IP", member)
    sets, key = IpSets(), Set(Family.IPV4, "KUBE-CLUSTER-IP")
    assert sets.read(Family) == {key: False}
    rejection = sets.create([key])[key]
    assert rejection.message.endswith(f"it exists as {there}, not hash:ip,port of IPv4")
    assert "ipset destroy KUBE-CLUSTER-IP" in rejection.hint
    assert sets.change([Member(*key, "10.0.0.2,tcp:80")], ())


def test_a_member_of_a_protocol_that_no_service_has_goes_as_any_other(node: Namespace) -> None:
    sets, key = IpSets(), Set(Family.IPV4, "KUBE-CLUSTER-IP")
    assert not sets.create([key])
    tool("add", "KUBE-CLUSTER-IP", "10.0.0.1,udplite:80")
    product = NodePortExpansion()
    found = product.collapse(sets.read(Family))
    change = product.expand(diff(found, {key: found[key]}))
    assert not sets.change((), (each for each in change.drops if isinstance(each, Member)))
    assert shown("KUBE-CLUSTER-IP") == set()
