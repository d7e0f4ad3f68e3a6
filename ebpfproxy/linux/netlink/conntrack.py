"""Conntrack entries of the calling thread's network namespace: list, add and delete them (ctnetlink).

NAT rules apply to the first packet of a flow; its conntrack entry translates all later ones, even after the
rules change. TCP connections need that. A UDP flow, however, continues to an endpoint that is gone, until
its entry is deleted. The callers decide which entries to delete.

100 000 entries are read in 1.5 s, and one is deleted in 0.02 ms; pyroute2 takes twenty times as long. A
kernel that filters dumps takes 0.1 s for 100 000 entries of which none match.

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
from ebpfproxy.linux.netlink.netlink import encoded
from ebpfproxy.linux.netlink.rtnetlink import NUMBERS, mapped, raw
from ebpfproxy.model.address import Address, Family, Protocol, family, format_endpoint
from ebpfproxy.model.connection import Connection

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
IPS_OFFLOAD = 1 << 14

TCP_CONNTRACK_ESTABLISHED, TCP_CONNTRACK_CLOSE_WAIT = 3, 5
_BE_LIBERAL = bytes([1 << 3, 1 << 3])  # struct nf_ct_tcp_flags: IP_CT_TCP_FLAG_BE_LIBERAL, and mask

_ADDRESSES = {int(socket.AF_INET): (1, 2), int(socket.AF_INET6): (3, 4)}  # CTA_IP_V4_SRC and so on


class Flow(NamedTuple):
    """One conntrack entry: the tuples of its original and of its reply direction. Ports in host order.

    With DNAT, `reply_source` differs from `destination`. With SNAT, `reply_destination` differs from
    `source`. `status` has the bits IPS_*. Each direction has a zone, 0 unless a rule sets another. `id` is
    the kernel's id of the entry (CTA_ID). `tcp_state` is one of TCP_CONNTRACK_*, 0 for other protocols,
    and for a connection that a flowtable has, which is established.
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
    tcp_state: int = 0

    @property
    def is_dnated(self) -> bool:
        return bool(self.status & IPS_DST_NAT)

    @property
    def is_offloaded(self) -> bool:
        """Whether a flowtable has it, so that its packets are forwarded at the ingress hook."""
        return bool(self.status & IPS_OFFLOAD)

    @property
    def is_snated(self) -> bool:
        return bool(self.status & IPS_SRC_NAT)

    def __str__(self) -> str:
        destination = format_endpoint(self.destination, self.destination_port)
        return f"{format_endpoint(self.source, self.source_port)} -> {destination}/{self.protocol.name}"


def flows(protocol: Protocol, of: Family | None = None) -> Iterator[Flow]:
    """The entries of a protocol in one family, or in both.

    The dump is complete when this function returns, so the thread may change its namespace before it
    iterates. Until then each entry takes 240 bytes. A dump is not a snapshot: entries that are created
    during it may be missing.

    Raises Unsupported without CAP_NET_ADMIN or CONFIG_NF_CT_NETLINK, else Rejected.
    """
    payloads: list[bytes] = []
    for each in [of] if of else list(Family):
        payloads += _dump(NUMBERS[each], _with_protocol(protocol))
    return (flow for flow in map(_flow, payloads) if flow and flow.protocol is protocol)


def masqueraded() -> Iterator[Flow]:
    """The entries whose source is translated (SNAT), of all protocols with ports, in both families.

    Like `flows`, and raises the same errors. If nothing is tracked, the result is empty, and the kernel loads
    no module for this call.
    """
    return _translated(IPS_SRC_NAT)


def redirected() -> Iterator[Flow]:
    """The entries whose destination is translated (DNAT), as `masqueraded`."""
    return _translated(IPS_DST_NAT)


def _translated(bit: int) -> Iterator[Flow]:
    if not _any_tracked():
        return iter(())
    payloads = _dump(socket.AF_UNSPEC, _with_status(bit))
    return (flow for flow in map(_flow, payloads) if flow and flow.status & bit)


def find(connection: Connection) -> Flow | None:
    """The entry of a connection, by its original tuple in the zone 0; None without one.

    Raises the errors of `flows`.
    """
    body = HEAD.pack(NUMBERS[family(connection.client[0])], 0, 0) + tuple_attribute(
        CTA_TUPLE_ORIG, connection.protocol, connection.client, connection.frontend
    )
    try:
        replies = netlink.get(NETLINK_NETFILTER, GET, body)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise failure("cannot look up a conntrack entry", error) from error
    return next(filter(None, map(_flow, replies)), None)


def answered_by(protocol: Protocol, source: tuple[Address, int], to: tuple[Address, int], zone: int) -> bool:
    """Whether an entry has this reply tuple: from `source` to `to`, in the reply zone `zone`.

    Raises the errors of `flows`.
    """
    try:
        netlink.get(NETLINK_NETFILTER, GET, _by_reply(protocol, source, to, zone))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise failure("cannot look up a conntrack entry", error) from error
    return True


def delete(flow: Flow) -> bool:
    """Delete one entry; return whether it still existed.

    NAT rules apply again to the next packet of the flow. The request identifies the entry by its reply tuple
    and id. So it does not delete a newer entry of the same client that leads to another endpoint.

    Raises Unsupported like `flows`, else Rejected. Before Linux 6.4 a flow in a flowtable is rejected
    (EBUSY).
    """
    try:
        netlink.change(NETLINK_NETFILTER, DELETE, _deletion(flow))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise failure(f"cannot delete the conntrack entry {flow}", error) from error
    return True


def track_tcp(
    connections: Iterable[tuple[tuple[Address, int], tuple[Address, int]]],
) -> dict[netlink.Rejection, int]:
    """Add an entry for each of these established TCP connections that has none.

    A connection has none if it was idle since conntrack was enabled. `connections` has the address and port
    (host order) of the client and of the server.

    The entries translate nothing. They reserve the tuple: if NAT of another connection would result in the
    same tuple, that connection gets another source port (nf_nat_used_tuple()). Conntrack does not check
    sequence numbers for these entries, since it knows none.

    Returns the number of rejected entries by reason; an entry that exists does not count as rejected.
    Raises Unsupported like `flows`, else Rejected.
    """
    timeout = int(sysctl.read("net/netfilter/nf_conntrack_tcp_timeout_established"))
    tcp = {
        CTA_TCP_STATE: bytes([TCP_CONNTRACK_ESTABLISHED]),
        CTA_TCP_FLAGS_ORIGINAL: _BE_LIBERAL,
        CTA_TCP_FLAGS_REPLY: _BE_LIBERAL,
    }
    state = encoded(
        {
            CTA_STATUS: (IPS_CONFIRMED | IPS_SEEN_REPLY | IPS_ASSURED).to_bytes(4),
            CTA_TIMEOUT: timeout.to_bytes(4),
            CTA_PROTOINFO | NESTED: {CTA_PROTOINFO_TCP | NESTED: tcp},
        }
    )
    flags = netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
    requests = [
        netlink.Request(
            NEW,
            flags,
            HEAD.pack(NUMBERS[family(client[0])], 0, 0)
            + tuple_attribute(CTA_TUPLE_ORIG, Protocol.TCP, client, server)
            + tuple_attribute(CTA_TUPLE_REPLY, Protocol.TCP, server, client)
            + state,
        )
        for client, server in connections
    ]
    try:
        rejected = netlink.changes(NETLINK_NETFILTER, requests)
    except OSError as error:
        raise failure("cannot add conntrack entries", error) from error
    return collections.Counter(each for each in rejected.values() if each.errno != errno.EEXIST)


def nat_in_use(of: Family | None = None) -> bool:
    """Whether any conntrack entry has DNAT or SNAT, of any protocol and by any program's rule.

    While one has, keep two things, or the kernel stops the translation of open flows:
    - the last nat chain of the family (nf_nat_unregister_fn())
    - a rule that uses conntrack, such as `ct state invalid counter`. Without one, packets are no longer
      tracked (nf_ct_netns_put()); an empty chain is not enough.

    Takes 4 µs for each such flow. Raises the errors of `flows`.
    """
    number = NUMBERS[of] if of else socket.AF_UNSPEC
    return any(
        _status(payload) & bit
        for bit in (IPS_SRC_NAT, IPS_DST_NAT)
        for payload in _dump(number, _with_status(bit))
    )


def tuple_attribute(
    kind: int, protocol: int, source: tuple[Address, int], target: tuple[Address, int]
) -> bytes:
    """CTA_TUPLE_ORIG or CTA_TUPLE_REPLY; ports in host order."""
    from_, to = _ADDRESSES[NUMBERS[family(source[0])]]
    return encoded(
        {
            kind | NESTED: {
                CTA_TUPLE_IP | NESTED: {from_: raw(source[0]), to: raw(target[0])},
                CTA_TUPLE_PROTO | NESTED: {
                    CTA_PROTO_NUM: protocol.to_bytes(1),
                    CTA_PROTO_SRC_PORT: source[1].to_bytes(2),
                    CTA_PROTO_DST_PORT: target[1].to_bytes(2),
                },
            }
        }
    )


def _dump(number: int, conditions: bytes) -> list[bytes]:
    """Payloads of the entries that meet `conditions`. A kernel that ignores them returns more entries."""
    try:
        return netlink.dump(NETLINK_NETFILTER, GET, HEAD.pack(number, 0, 0) + conditions)
    except OSError as error:
        raise failure("cannot list conntrack entries", error) from error


def _with_protocol(protocol: Protocol) -> bytes:
    number = {CTA_PROTO_NUM: protocol.to_bytes(1)}
    return encoded(
        {
            CTA_TUPLE_ORIG | NESTED: {CTA_TUPLE_PROTO | NESTED: number},
            CTA_FILTER | NESTED: {_FILTER_ORIG_FLAGS: _BY_PROTOCOL},
        }
    )


def _with_status(bit: int) -> bytes:
    return encoded({CTA_STATUS: bit.to_bytes(4), CTA_STATUS_MASK: bit.to_bytes(4)})


def _deletion(flow: Flow) -> bytes:
    """The body of a request to delete this entry. The id keeps an entry with the same tuple safe."""
    source = flow.reply_source, flow.reply_source_port
    destination = flow.reply_destination, flow.reply_destination_port
    reply_tuple = _by_reply(flow.protocol, source, destination, flow.reply_zone)
    return reply_tuple + netlink.attribute(CTA_ID, flow.id.to_bytes(4))


def _by_reply(protocol: Protocol, source: tuple[Address, int], to: tuple[Address, int], zone: int) -> bytes:
    """The body of a request for the entry with this reply tuple. Without one it would affect all entries."""
    return (
        HEAD.pack(NUMBERS[family(source[0])], 0, 0)
        + tuple_attribute(CTA_TUPLE_REPLY, protocol, source, to)
        + netlink.attribute(CTA_ZONE, zone.to_bytes(2))
    )


def _any_tracked() -> bool:
    try:
        return sysctl.read("net/netfilter/nf_conntrack_count") != "0"
    except NotFound:
        return False


def _flow(payload: bytes) -> Flow | None:
    """The entry in a payload; None for a protocol without ports."""
    address_types = _ADDRESSES[payload[0]]
    attributes = dict(netlink.attributes(payload, HEAD.size))
    original = _direction(attributes.get(CTA_TUPLE_ORIG, b""), address_types)
    reply = _direction(attributes.get(CTA_TUPLE_REPLY, b""), address_types)
    if original is None or reply is None:
        return None
    protocol, source, source_port, destination, destination_port, zone = original
    _, reply_source, reply_source_port, reply_destination, reply_destination_port, reply_zone = reply
    common_zone = _number(attributes.get(CTA_ZONE))
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
        _number(attributes.get(CTA_STATUS)),
        zone or common_zone,
        reply_zone or common_zone,
        _number(attributes.get(CTA_MARK)),
        _number(attributes.get(CTA_ID)),
        _tcp_state(attributes.get(CTA_PROTOINFO, b"")),
    )


def _tcp_state(protocol_info: bytes) -> int:
    of_tcp = dict(netlink.attributes(protocol_info, 0)).get(CTA_PROTOINFO_TCP, b"")
    return _number(dict(netlink.attributes(of_tcp, 0)).get(CTA_TCP_STATE))


def _direction(
    value: bytes, address_types: tuple[int, int]
) -> tuple[Protocol, Address, int, Address, int, int] | None:
    """Protocol, source, source port, destination, destination port and zone (0 if it has none of its own).

    None for a protocol without ports.
    """
    attributes = dict(netlink.attributes(value, 0))
    addresses = dict(netlink.attributes(attributes.get(CTA_TUPLE_IP, b""), 0))
    ports = dict(netlink.attributes(attributes.get(CTA_TUPLE_PROTO, b""), 0))
    protocol = _PROTOCOLS.get(ports.get(CTA_PROTO_NUM, b""))
    source, destination = address_types
    if protocol is None or source not in addresses or destination not in addresses:
        return None
    return (
        protocol,
        mapped(addresses[source]),
        _number(ports.get(CTA_PROTO_SRC_PORT)),
        mapped(addresses[destination]),
        _number(ports.get(CTA_PROTO_DST_PORT)),
        _number(attributes.get(CTA_TUPLE_ZONE)),
    )


_PROTOCOLS = {protocol.to_bytes(1): protocol for protocol in Protocol}


def _number(value: bytes | None) -> int:
    """A number in network byte order, as in all ctnetlink attributes; 0 if the attribute is missing."""
    return int.from_bytes(value) if value else 0


def _status(payload: bytes) -> int:
    return _number(dict(netlink.attributes(payload, HEAD.size)).get(CTA_STATUS))


_LOAD = "load CONFIG_NF_CT_NETLINK: modprobe nf_conntrack_netlink"


def failure(action: str, error: OSError, remedy: str = _LOAD) -> KernelError:
    """nfnetlink returns EINVAL for a subsystem that it lacks (nfnetlink_rcv_msg()). Without nfnetlink, the
    socket cannot be created."""
    message = f"{action}: {error.strerror or error}"
    if error.errno in (errno.EPERM, errno.EACCES):
        return Unsupported(message, "run with the capability CAP_NET_ADMIN")
    if error.errno in (errno.EINVAL, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP):
        return Unsupported(message, remedy)
    return Rejected(message)
