"""Connection tracking: the entries of a network namespace, adding some and ending one (ctnetlink).

What has been translated once is translated by its entry from then on, whatever the rules say now. For TCP
that is as it should be; a UDP flow continues to an endpoint that is gone. Which flows are ended is decided
elsewhere.

Read with raw netlink, not with pyroute2 (see `netlink` for why). Measured: pyroute2 0.9 reads 10 000 entries
in 3.9 s and 100 000 in 32 s, these lines in 0.15 s and 1.5 s; to end one takes 0.4 ms there, 0.02 ms here.
The kernel, where it can, filters by itself: 0.1 s for 100 000 entries of which none match.

Everything here acts in the network namespace that the calling thread is in.
Sources: include/uapi/linux/netfilter/{nfnetlink,nfnetlink_conntrack,nf_conntrack_common}.h;
net/netfilter/nf_conntrack_netlink.c; cb8aa9a3affb ("netfilter: ctnetlink: add kernel side filtering for
dump", 5.8); 9344988d2979 ("netfilter: ctnetlink: allow to filter dump by status bits", 5.15).
"""

import collections
import errno
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.errors import KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.model.address import V4_PREFIX, Address, Family, Protocol, family, format_endpoint

NETLINK_NETFILTER = 12
_SUBSYSTEM = 1 << 8  # NFNL_SUBSYS_CTNETLINK, the upper byte of a message's type
NEW, GET, DELETE = _SUBSYSTEM | 0, _SUBSYSTEM | 1, _SUBSYSTEM | 2  # IPCTNL_MSG_CT_*

HEAD = struct.Struct("=BBH")  # struct nfgenmsg: family, version, res_id
NESTED = 0x8000  # NLA_F_NESTED

CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_STATUS, CTA_MARK, CTA_ID, CTA_ZONE = 1, 2, 3, 8, 12, 18
CTA_PROTOINFO, CTA_TIMEOUT = 4, 7
CTA_PROTOINFO_TCP = 1
CTA_TCP_STATE, CTA_TCP_FLAGS_ORIGINAL, CTA_TCP_FLAGS_REPLY = 1, 4, 5  # CTA_PROTOINFO_TCP_*
CTA_FILTER, CTA_STATUS_MASK = 25, 26
CTA_TUPLE_IP, CTA_TUPLE_PROTO, CTA_TUPLE_ZONE = 1, 2, 3
CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT = 1, 2, 3
_FILTER_ORIG_FLAGS, _BY_PROTOCOL = 1, 1 << 3  # CTA_FILTER_ORIG_FLAGS, CTA_FILTER_F_CTA_PROTO_NUM

IPS_SEEN_REPLY = 1 << 1
IPS_ASSURED = 1 << 2
IPS_CONFIRMED = 1 << 3
IPS_SRC_NAT = 1 << 4
IPS_DST_NAT = 1 << 5

TCP_CONNTRACK_ESTABLISHED = 3
_BE_LIBERAL = struct.pack(
    "=BB", 1 << 3, 1 << 3
)  # struct nf_ct_tcp_flags: IP_CT_TCP_FLAG_BE_LIBERAL, and mask

_NUMBERS = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_ADDRESSES = {int(socket.AF_INET): (1, 2), int(socket.AF_INET6): (3, 4)}  # CTA_IP_V4_SRC and so on
_FLAGS = struct.Struct("=I")


class Flow(NamedTuple):
    """One entry, as the client sees it and as the answers do.

    Where the destination was translated (DNAT), the reply's source is not the original destination; where
    the source was (SNAT), the reply's destination is not the original source. `status` are the bits IPS_*.
    Zones are 0 unless a rule sets others; each direction has its own. `id` is the kernel's, of this
    very entry.
    """

    protocol: Protocol
    source: Address
    source_port: int
    destination: Address
    destination_port: int
    reply_source: Address
    reply_source_port: int
    reply_destination: Address
    reply_destination_port: int
    status: int
    zone: int
    reply_zone: int
    mark: int
    id: int

    @property
    def is_dnated(self) -> bool:
        return bool(self.status & IPS_DST_NAT)

    @property
    def is_snated(self) -> bool:
        return bool(self.status & IPS_SRC_NAT)

    def __str__(self) -> str:
        destination = format_endpoint(self.destination, self.destination_port)
        return f"{format_endpoint(self.source, self.source_port)} -> {destination}/{self.protocol.name}"


def flows(protocol: Protocol, of: Family | None = None) -> Iterator[Flow]:
    """The entries of a protocol in one family, or in both.

    The kernel has been asked, in the thread's namespace of the moment, when this returns; until the last one
    is taken, each entry costs 240 bytes. A dump is no snapshot: what begins meanwhile may be missing.

    Raises Unsupported without CAP_NET_ADMIN, or where the kernel does not tell its entries; else Rejected.
    """
    payloads: list[bytes] = []
    for each in [of] if of else list(Family):
        payloads += _dump(_NUMBERS[each], _only(protocol))
    return (flow for flow in map(_flow, payloads) if flow and flow.protocol is protocol)


def masqueraded() -> Iterator[Flow]:
    """The entries whose source is translated (SNAT), of all protocols with ports, in both families.

    None, and no module is loaded for it, where nothing is tracked. Else as `flows`, and raises as it does.
    """
    if not _any_tracked():
        return iter(())
    payloads = _dump(socket.AF_UNSPEC, _with_status(IPS_SRC_NAT))
    return (flow for flow in map(_flow, payloads) if flow and flow.is_snated)


def answered_by(protocol: Protocol, source: tuple[Address, int], to: tuple[Address, int], zone: int) -> bool:
    """Whether there is an entry of which a packet from `source` to `to` is a reply, in that zone of replies.

    Raises as `flows`.
    """
    try:
        netlink.get(NETLINK_NETFILTER, GET, _by_reply(protocol, source, to, zone))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise _failure("a tracked flow cannot be looked up", error) from error
    return True


def delete(flow: Flow) -> bool:
    """End one entry; whether it was still there.

    The entry is named by its reply, so one that the same client got since, to another endpoint, is left
    alone. The kernel asks for no more than that the next packet be looked at again.

    Raises Unsupported as `flows` does, and Rejected, for a flow that a flow table carries (EBUSY) too.
    """
    try:
        netlink.change(NETLINK_NETFILTER, DELETE, _naming(flow))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise _failure(f"the tracked flow {flow} cannot be ended", error) from error
    return True


def track_tcp(
    connections: Iterable[tuple[tuple[Address, int], tuple[Address, int]]],
) -> dict[netlink.Rejection, int]:
    """Add an entry for each established TCP connection that conntrack does not know, since it was idle since
    tracking began. `connections`: address and port (host order) of the client and of the server.

    The entry translates nothing. Another connection that is translated to the same addresses and ports then
    gets another source port (nf_nat_used_tuple()). Sequence numbers are not checked: none is known.

    Returns why entries were rejected, and how many for each reason; one that exists is none.
    Raises Unsupported as `flows`, and Rejected.
    """
    timeout = int(sysctl.read("net/netfilter/nf_conntrack_tcp_timeout_established"))
    state = (
        netlink.attribute(CTA_STATUS, (IPS_CONFIRMED | IPS_SEEN_REPLY | IPS_ASSURED).to_bytes(4))
        + netlink.attribute(CTA_TIMEOUT, timeout.to_bytes(4))
        + nested(
            CTA_PROTOINFO,
            nested(
                CTA_PROTOINFO_TCP,
                netlink.attribute(CTA_TCP_STATE, bytes([TCP_CONNTRACK_ESTABLISHED])),
                netlink.attribute(CTA_TCP_FLAGS_ORIGINAL, _BE_LIBERAL),
                netlink.attribute(CTA_TCP_FLAGS_REPLY, _BE_LIBERAL),
            ),
        )
    )
    flags = netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
    requests = [
        netlink.Request(
            NEW,
            flags,
            HEAD.pack(_NUMBERS[family(client[0])], 0, 0)
            + tuple_attribute(CTA_TUPLE_ORIG, Protocol.TCP, client, server)
            + tuple_attribute(CTA_TUPLE_REPLY, Protocol.TCP, server, client)
            + state,
        )
        for client, server in connections
    ]
    try:
        rejected = netlink.changes(NETLINK_NETFILTER, requests)
    except OSError as error:
        raise _failure("connections cannot be tracked", error) from error
    return collections.Counter(each for each in rejected.values() if each.errno != errno.EEXIST)


def nat_in_use(of: Family | None = None) -> bool:
    """Whether the kernel translates any flow, of any protocol, anybody's: DNAT or SNAT.

    As long as it does, the last nat chain of that family has to stay, else flows that are open are translated
    no more (nf_nat_unregister_fn()). So has a rule that asks conntrack for something, be it the last one, as
    `ct state invalid counter`: an empty chain does not have packets tracked (nf_ct_netns_put()).

    Takes 4 µs for each such flow. Raises as `flows`.
    """
    number = _NUMBERS[of] if of else socket.AF_UNSPEC
    return any(
        _status(payload) & bit
        for bit in (IPS_SRC_NAT, IPS_DST_NAT)
        for payload in _dump(number, _with_status(bit))
    )


def nested(kind: int, *attributes: bytes) -> bytes:
    """One attribute that holds others."""
    return netlink.attribute(kind | NESTED, b"".join(attributes))


def tuple_attribute(
    kind: int, protocol: int, source: tuple[Address, int], target: tuple[Address, int]
) -> bytes:
    """CTA_TUPLE_ORIG or CTA_TUPLE_REPLY: from where to where, in one direction."""
    of = family(source[0])
    skip = len(V4_PREFIX) if of is Family.IPV4 else 0
    from_, to = _ADDRESSES[_NUMBERS[of]]
    return nested(
        kind,
        nested(
            CTA_TUPLE_IP,
            netlink.attribute(from_, source[0][skip:]),
            netlink.attribute(to, target[0][skip:]),
        ),
        nested(
            CTA_TUPLE_PROTO,
            netlink.attribute(CTA_PROTO_NUM, protocol.to_bytes(1)),
            netlink.attribute(CTA_PROTO_SRC_PORT, source[1].to_bytes(2)),
            netlink.attribute(CTA_PROTO_DST_PORT, target[1].to_bytes(2)),
        ),
    )


def _dump(number: int, conditions: bytes) -> list[bytes]:
    """Payloads of what meets `conditions`, and of more on a kernel that does not know these."""
    try:
        return netlink.dump(NETLINK_NETFILTER, GET, HEAD.pack(number, 0, 0) + conditions)
    except OSError as error:
        raise _failure("the tracked flows cannot be listed", error) from error


def _only(protocol: Protocol) -> bytes:
    number = netlink.attribute(CTA_PROTO_NUM, protocol.to_bytes(1))
    flags = netlink.attribute(_FILTER_ORIG_FLAGS, _FLAGS.pack(_BY_PROTOCOL))
    return nested(CTA_TUPLE_ORIG, nested(CTA_TUPLE_PROTO, number)) + nested(CTA_FILTER, flags)


def _with_status(bit: int) -> bytes:
    value = bit.to_bytes(4)
    return netlink.attribute(CTA_STATUS, value) + netlink.attribute(CTA_STATUS_MASK, value)


def _naming(flow: Flow) -> bytes:
    """The body of a request about this very entry."""
    replying = flow.reply_source, flow.reply_source_port
    to = flow.reply_destination, flow.reply_destination_port
    named = _by_reply(flow.protocol, replying, to, flow.reply_zone)
    return named + netlink.attribute(CTA_ID, flow.id.to_bytes(4))


def _by_reply(protocol: Protocol, source: tuple[Address, int], to: tuple[Address, int], zone: int) -> bytes:
    """The body of a request about one entry. Without a tuple it would be about all that there are."""
    return (
        HEAD.pack(_NUMBERS[family(source[0])], 0, 0)
        + tuple_attribute(CTA_TUPLE_REPLY, protocol, source, to)
        + netlink.attribute(CTA_ZONE, zone.to_bytes(2))
    )


def _any_tracked() -> bool:
    try:
        return sysctl.read("net/netfilter/nf_conntrack_count") != "0"
    except NotFound:
        return False


def _flow(payload: bytes) -> Flow | None:
    """None for a protocol without ports."""
    addresses = _ADDRESSES[payload[0]]
    found = dict(netlink.attributes(payload, HEAD.size))
    original = _direction(found.get(CTA_TUPLE_ORIG, b""), addresses)
    reply = _direction(found.get(CTA_TUPLE_REPLY, b""), addresses)
    if original is None or reply is None:
        return None
    protocol, source, source_port, destination, destination_port, zone = original
    _, reply_source, reply_source_port, reply_destination, reply_destination_port, reply_zone = reply
    both = _number(found.get(CTA_ZONE))
    return Flow(
        protocol,
        source,
        source_port,
        destination,
        destination_port,
        reply_source,
        reply_source_port,
        reply_destination,
        reply_destination_port,
        _number(found.get(CTA_STATUS)),
        zone or both,
        reply_zone or both,
        _number(found.get(CTA_MARK)),
        _number(found.get(CTA_ID)),
    )


def _direction(
    value: bytes, addresses: tuple[int, int]
) -> tuple[Protocol, Address, int, Address, int, int] | None:
    """Protocol, source and port, destination and port, and the zone, where this direction has its own."""
    parts = dict(netlink.attributes(value, 0))
    ends = dict(netlink.attributes(parts.get(CTA_TUPLE_IP, b""), 0))
    ports = dict(netlink.attributes(parts.get(CTA_TUPLE_PROTO, b""), 0))
    protocol = _PROTOCOLS.get(ports.get(CTA_PROTO_NUM, b""))
    from_, to = addresses
    if protocol is None or from_ not in ends or to not in ends:
        return None
    return (
        protocol,
        _address(ends[from_]),
        _number(ports.get(CTA_PROTO_SRC_PORT)),
        _address(ends[to]),
        _number(ports.get(CTA_PROTO_DST_PORT)),
        _number(parts.get(CTA_TUPLE_ZONE)),
    )


_PROTOCOLS = {protocol.to_bytes(1): protocol for protocol in Protocol}


def _address(value: bytes) -> Address:
    return Address(V4_PREFIX + value if len(value) == 4 else value)


def _number(value: bytes | None) -> int:
    """In network order, as ctnetlink has them all; 0 where the attribute is missing."""
    return int.from_bytes(value) if value else 0


def _status(payload: bytes) -> int:
    return _number(dict(netlink.attributes(payload, HEAD.size)).get(CTA_STATUS))


def _failure(what: str, error: OSError) -> KernelError:
    """nfnetlink answers EINVAL for a part that it has not got (nfnetlink_rcv_msg()); without nfnetlink there
    is no such socket."""
    message = f"{what}: {error.strerror or error}"
    if error.errno in (errno.EPERM, errno.EACCES):
        return Unsupported(message, "it takes the capability CAP_NET_ADMIN")
    if error.errno in (errno.EINVAL, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP):
        return Unsupported(
            message, "modprobe nf_conntrack_netlink, or use a kernel with CONFIG_NF_CT_NETLINK"
        )
    return Rejected(message)
