"""Messages of IPVS and /proc/net/ip_vs, without a kernel that has IPVS."""

from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.linux.ipvs import ipvs, messages
from ebpfproxy.linux.ipvs.messages import (
    Command,
    Connections,
    Flag,
    Method,
    RealServer,
    ServerKey,
    VirtualServer,
)
from ebpfproxy.model.address import V4_PREFIX, Address, Family, Protocol, family, parse_address

FOUR = st.binary(min_size=4, max_size=4).map(lambda raw: Address(V4_PREFIX + raw))
SIX = st.binary(min_size=16, max_size=16).map(Address)
KEYS = st.builds(ServerKey, FOUR | SIX, st.integers(0, 65535), st.sampled_from(Protocol))
FLAGS = st.integers(0, 7).map(lambda bits: Flag(4 * bits))

TABLE = b"""IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A600001:0050 rr persistent 10800 FFFFFFFF
  -> 0A010002:1F90      Masq    1      12         3         \n\
  -> 0A010001:1F90      Masq    0      0          0         \n\
FWM  00000007 rr persistent 60 FFFFFFFF
  -> 0A010009:0000      Route   1      5          5         \n\
UDP  0A600001:0035 rr ops\x20
SCTP  [fd00:0096:0000:0000:0000:0000:0000:0001]:0102 mh persistent 60 40000000
  -> [fd00:0001:0000:0000:0000:0000:0000:0002]:0051      Tunnel  65535  1          2147483647\n\
"""


@given(
    st.builds(VirtualServer, KEYS, st.sampled_from(["rr", "mh"]), FLAGS, st.integers(0, 1 << 31)), st.data()
)
def test_a_virtual_server_is_decoded_as_it_was_encoded(virtual: VirtualServer, data: st.DataObject) -> None:
    shorter = st.integers(1, 31 if family(virtual.key.address) is Family.IPV4 else 127)
    virtual = virtual._replace(prefix=data.draw(st.none() | shorter))
    payload = messages.head(Command.NEW_SERVER) + messages.describe_server(virtual)
    assert messages.read_server(payload) == virtual


def test_real_servers_are_read_with_their_connections_and_those_by_mark_skipped() -> None:
    web = ServerKey(parse_address("10.96.0.1"), 80, Protocol.TCP)
    dns = ServerKey(parse_address("10.96.0.1"), 53, Protocol.UDP)
    six = ServerKey(parse_address("fd00:96::1"), 258, Protocol.SCTP)
    assert ipvs.real_servers(TABLE) == {
        web: {
            RealServer(parse_address("10.1.0.2"), 8080): Connections(12, 3),
            RealServer(parse_address("10.1.0.1"), 8080, 0): Connections(0, 0),
        },
        dns: {},
        six: {RealServer(parse_address("fd00:1::2"), 81, 65535, Method.TUNNEL): Connections(1, 2147483647)},
    }


def test_no_table_and_an_empty_one_have_no_real_servers() -> None:
    assert ipvs.real_servers(b"") == {}
    assert ipvs.real_servers(b"\n".join(TABLE.splitlines()[:3])) == {}


def test_only_the_counters_are_removed_from_the_table() -> None:
    busy = TABLE.replace(b"12         3         ", b"2000000000 1         ")
    assert busy != TABLE
    assert ipvs.without_counters(busy) == ipvs.without_counters(TABLE)
    for before, after in (
        (b"Masq    1 ", b"Masq    2 "),
        (b"40000000", b"30000000"),
        (b":0051", b":0052"),
        (b"rr ops", b"rr "),
    ):
        assert before in TABLE
        other = TABLE.replace(before, after)
        assert ipvs.without_counters(other) != ipvs.without_counters(TABLE)


def test_the_text_of_an_operation_is_its_subject() -> None:
    key = ServerKey(parse_address("fd00:96::1"), 53, Protocol.UDP)
    assert str(ipvs.add_server(VirtualServer(key, "rr"))) == "virtual server [fd00:96::1]:53/UDP"
    removal = ipvs.delete_real(key, parse_address("fd00:1::1"), 54)
    assert str(removal) == "real server [fd00:1::1]:54 of [fd00:96::1]:53/UDP"
