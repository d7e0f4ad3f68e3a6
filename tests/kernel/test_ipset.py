"""Sets created, filled and read in a separate namespace."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Member, Set
from ebpfproxy.backends.ipvs.node_port_expansion import NodePortExpansion
from ebpfproxy.backends.ipvs.sets import IpSets
from ebpfproxy.errors import AlreadyExists, NotFound, Rejected, TableFull, Unsupported
from ebpfproxy.linux import ipset, tools
from ebpfproxy.linux.ipset import IpSet, Stored
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


def filled(contents: dict[IpSet, set[str]]) -> None:
    commands = [f"add {made.name} {member}" for made, members in contents.items() for member in members]
    assert ipset.change([*map(ipset.creation, contents), *commands]) == {}


def members(name: str) -> frozenset[str]:
    return ipset.read([name])[name].members


def test_written_members_are_read_back_with_the_type_and_counted(node: Namespace) -> None:
    filled(CONTENTS)
    assert ipset.read([made.name for made in CONTENTS]) == {
        made.name: Stored(made.type, made.family, frozenset(wanted)) for made, wanted in CONTENTS.items()
    }
    assert ipset.elements() == {made.name: len(wanted) for made, wanted in CONTENTS.items()}


def test_a_namespace_without_sets_lists_none(node: Namespace) -> None:
    assert ipset.elements() == {}
    assert ipset.read(["GONE"]) == ipset.read([]) == {}


def test_a_set_that_a_rule_refers_to_is_not_destroyed(node: Namespace) -> None:
    filled({WEB: {"10.0.0.1,tcp:80"}, PORTS: {"1"}})
    rule = ["-m", "set", "--match-set", "WEB", "dst,dst", "-j", "DROP"]
    subprocess.run(["iptables-legacy", "-w", "-A", "OUTPUT", *rule], check=True)
    rejected = ipset.change(["destroy WEB", "destroy GONE", "destroy PORTS"])
    assert "in use" in rejected.pop(0).message
    assert not rejected
    assert ipset.elements() == {"WEB": 1}


def test_adding_existing_and_dropping_missing_entries_is_no_error(node: Namespace) -> None:
    filled({WEB: {"10.0.0.1,tcp:80"}, PORTS: {"1"}})
    commands = ["add WEB 10.0.0.1,tcp:80", "del WEB 10.0.0.9,tcp:80", "add PORTS 1", "del PORTS 2"]
    assert ipset.change(commands) == {}
    assert members("WEB") == {"10.0.0.1,tcp:80"}
    assert members("PORTS") == {"1"}


def test_invalid_members_are_rejected_and_the_others_added(node: Namespace) -> None:
    bad = ["10.0.0.1", "fd00::1,tcp:80", "10.0.0.1,pigeon:80"]
    filled({WEB: set(), PORTS: set()})
    commands = [*(f"add WEB {member}" for member in bad), "add WEB 10.0.0.1,tcp:80", "add PORTS 8"]
    rejected = ipset.change(commands)
    assert set(rejected) == {0, 1, 2}
    assert all(isinstance(error, Rejected) for error in rejected.values())
    assert members("WEB") == {"10.0.0.1,tcp:80"}
    assert members("PORTS") == {"8"}


def test_a_network_of_length_0_is_rejected_by_the_kernel(node: Namespace) -> None:
    """hash:net cannot hold a /0. Callers add the two /1 networks."""
    filled({IpSet("FROM", "hash:ip,port,net", Family.IPV4): set()})
    nets = ("0.0.0.0/0", "0.0.0.0/1")
    rejected = ipset.change(f"add FROM 10.0.0.1,tcp:80,{net}" for net in nets)
    assert set(rejected) == {0}
    assert "CIDR" in rejected[0].message
    assert members("FROM") == {"10.0.0.1,tcp:80,0.0.0.0/1"}


def test_members_beyond_the_maximum_are_rejected_and_those_of_other_sets_added(node: Namespace) -> None:
    wanted = [f"10.0.{number // 256}.{number % 256},tcp:80" for number in range(300)]
    filled({WEB._replace(max_elements=100): set(), PORTS: set()})
    rejected = ipset.change([*(f"add WEB {member}" for member in wanted), "add PORTS 1"])
    assert len(rejected) == 200
    assert all(isinstance(error, TableFull) for error in rejected.values())
    held = members("WEB")
    assert held == {member for number, member in enumerate(wanted) if number not in rejected}
    assert members("PORTS") == {"1"}
    some, missing = min(held), wanted[min(rejected)]
    assert ipset.change([f"del WEB {some}", f"add WEB {missing}"]) == {}


def test_commands_for_a_missing_set_are_rejected_with_not_found(node: Namespace) -> None:
    filled({PORTS: set()})
    rejected = ipset.change(["add GONE 1", "add GONE 2", "add PORTS 1", "del GONE 3"])
    assert set(rejected) == {0, 1, 3}
    assert all(isinstance(error, NotFound) for error in rejected.values())
    assert members("PORTS") == {"1"}


def test_a_set_with_other_parameters_exists_already(node: Namespace) -> None:
    filled({WEB: {"10.0.0.1,tcp:80"}})
    assert ipset.change([ipset.creation(WEB)]) == {}
    others = (WEB._replace(type="hash:ip"), WEB._replace(max_elements=7))
    rejected = ipset.change(map(ipset.creation, others))
    assert len(rejected) == len(others)
    assert all(isinstance(error, AlreadyExists) for error in rejected.values())
    assert members("WEB") == {"10.0.0.1,tcp:80"}


def test_without_the_capability_nothing_can_be_used(node: Namespace) -> None:
    """An error that does not depend on the command is reported once."""
    confined = """import os; from ebpfproxy.linux import ipset, tools
os.setuid(65534)
for use in (ipset.elements, lambda: ipset.change(["add WEB 1", "add WEB 2"])):
    try:
        print(use())
    except Exception as error:
        print(type(error).__name__, error.message)
"""
    done = subprocess.run([sys.executable, "-c", confined], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("not permitted" in line for line in lines), lines


def test_without_the_tool_a_node_without_sets_is_read(
    node: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tools, "FOLDERS", str(tmp_path))
    assert IpSets().read(Family) == {}
    assert not sets.exist()
    with pytest.raises(Unsupported, match="cannot find ipset"):
        ipset.available()
    tool("create", "KUBE-CLUSTER-IP", "hash:ip,port")
    with pytest.raises(Unsupported, match="cannot find ipset"):
        IpSets().read(Family)


def test_a_foreign_set_with_comments_and_timeouts_is_read(node: Namespace) -> None:
    tool("create", "WEB", "hash:ip,port", "comment", "timeout", "1000", "counters")
    tool("add", "WEB", "10.0.0.1,tcp:80", "comment", "foreign\\ and with blanks")
    assert members("WEB") == {"10.0.0.1,tcp:80"}


def test_tens_of_thousands_of_members_are_written_and_read(node: Namespace) -> None:
    wanted = {f"10.{number >> 8}.{number & 255}.1,tcp:80" for number in range(30_000)}
    filled({WEB: wanted})
    assert members("WEB") == wanted
    assert ipset.change(f"del WEB {member}" for member in wanted) == {}
    assert members("WEB") == frozenset()


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
