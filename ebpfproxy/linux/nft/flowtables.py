"""Netlink messages of flowtables, and the flowtables in the kernel's replies.

A flowtable has flows of conntrack. At the ingress hook of its devices, the kernel forwards and translates
packets of these flows, which then pass no other hook. The statement `flow add` of a rule adds a flow.

Sources: include/uapi/linux/netfilter/nf_tables.h; nf_tables_newflowtable() and nf_tables_delflowtable() of
net/netfilter/nf_tables_api.c; 05abe4456fa3 ("netfilter: nf_tables: allow to register flowtable with no
devices", 5.8).
"""

from collections.abc import Sequence
from typing import NamedTuple

from ebpfproxy.linux.netlink.netlink import NLM_F_CREATE, attributes, text
from ebpfproxy.linux.nft.encoding import name, nested, number, u32
from ebpfproxy.linux.nft.messages import HEAD, Kind, Operation, Table

_INGRESS = 0  # NF_NETDEV_INGRESS
_PRIORITY = 0
_COUNTER = 2  # NFT_FLOWTABLE_COUNTER
_DEVICE = 1  # NFTA_DEVICE_NAME

DECLARATION = "hook ingress priority 0; counter;"
"""The form of the flowtables that `add_flowtable` creates. `counter`: if accounting of conntrack is enabled
(nf_conntrack_acct), it counts their packets, too.
"""


class ListedFlowtable(NamedTuple):
    """A flowtable. `declaration` is DECLARATION, or "" for another form. `devices`: their names."""

    name: str
    declaration: str
    devices: tuple[str, ...]


def add_flowtable(table: Table, flowtable: str, devices: Sequence[str] = ()) -> Operation:
    """Add a flowtable, or devices to an existing one. Devices that it has are ignored.

    Rejected with ENOENT if a device does not exist, with EOPNOTSUPP without CONFIG_NF_FLOW_TABLE_INET.
    """
    hook = u32(1, _INGRESS), u32(2, _PRIORITY), _listed(devices)
    body = _of(table, flowtable) + nested(3, *hook) + u32(7, _COUNTER)
    return Operation(Kind.NEW_FLOWTABLE, NLM_F_CREATE, table.number, body)


def delete_flowtable(table: Table, flowtable: str) -> Operation:
    """Delete a flowtable. Its flows continue past the other hooks. Rejected with EBUSY if a rule uses it."""
    return Operation(Kind.DELETE_FLOWTABLE, 0, table.number, _of(table, flowtable))


def delete_device(table: Table, flowtable: str, device: str) -> Operation:
    """Remove a device from a flowtable. Rejected with ENOENT if the flowtable does not have it.

    abadb2f865d7 ("netfilter: nf_tables: delete devices from flowtable", 5.8).
    """
    body = _of(table, flowtable) + nested(3, _listed([device]))
    return Operation(Kind.DELETE_FLOWTABLE, 0, table.number, body)


def read_flowtable(payload: bytes) -> ListedFlowtable:
    """Return the flowtable in a reply."""
    found = dict(attributes(payload, HEAD.size))
    hook = dict(attributes(found.get(3, b""), 0))
    form = number(hook.get(1)), number(hook.get(2)), number(found.get(7))
    is_ours = form == (_INGRESS, _PRIORITY, _COUNTER)
    devices = (text(value) for kind, value in attributes(hook.get(3, b""), 0) if kind == _DEVICE)
    return ListedFlowtable(text(found.get(2)), DECLARATION if is_ours else "", tuple(devices))


def _of(table: Table, flowtable: str) -> bytes:
    return name(1, table.name) + name(2, flowtable)


def _listed(devices: Sequence[str]) -> bytes:
    return nested(3, *(name(_DEVICE, device) for device in devices))
