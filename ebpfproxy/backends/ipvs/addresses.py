"""Addresses of Services that the node takes for its own, so that packets to them come to IPVS.

They are on kube-ipvs0, which is a dummy and stays down: no packet ever leaves or comes by it. An address that
another device has is local anyway, and stays off kube-ipvs0: a node that lost it there, while it is still the
node's, would be cut off (kubernetes issue 114815). What is on kube-ipvs0 is in the set KUBE-IPVS-IPS, too, by
which ports of it that no Service has are rejected.
"""

from collections.abc import Collection, Iterable, Mapping

from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Entry, Key, Local, Member
from ebpfproxy.backends.ipvs.ip_sets import IpSets, Rejections
from ebpfproxy.backends.ipvs.sets import set_name
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.netlink import dummy, local_addresses
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.model.address import Address, Family, Network, family, format_address, parse_address

_SINGLE = 128


def on_device() -> frozenset[Address]:
    """What kube-ipvs0 has; nothing where there is none. Raises KernelError."""
    try:
        return dummy.addresses(KUBE_IPVS0)
    except NotFound:
        return frozenset()


class Addresses:
    """In the calling thread's network namespace. Whether another device has one is known as of the last
    reading: then what changed since is put right."""

    def __init__(self, ip_sets: IpSets) -> None:
        self._sets = ip_sets
        self._wanted: set[Address] = set()
        self._elsewhere: frozenset[Network] = frozenset()

    def read(self, found: Mapping[Key, Entry], families: Collection[Family]) -> dict[Key, Entry]:
        """`found`: what the sets have; what is said here for an address is left out of it."""
        device, self._elsewhere = on_device(), local_addresses.read()
        members = set()
        entries = {}
        for key, entry in found.items():
            if isinstance(key, Member) and sets.NAMES[key.set][0] == sets.IPVS_IPS:
                members.add(parse_address(key.text))
            else:
                entries[key] = entry
        for address in device | members | self._wanted:
            of = family(address)
            if of not in families:
                continue
            if self._is_elsewhere(address):
                right = address not in device and address not in members
                known = address in self._wanted or not right
            else:
                right = address in device and address in members
                known = address in device or address in members
            if known:
                entries[Local(of, address)] = right
        return entries

    def shared(self) -> frozenset[Address]:
        """Those of Services that another device has as well, now. Raises KernelError."""
        local = local_addresses.read()
        known = on_device() | self._wanted
        return frozenset(each for each in known if Network(each, _SINGLE) in local)

    def put(self, keys: Iterable[Local]) -> Rejections:
        keys = list(keys)
        self._wanted |= {key.address for key in keys}
        here = [key for key in keys if not self._is_elsewhere(key.address)]
        rejected = self._drop([key for key in keys if self._is_elsewhere(key.address)])
        if here:
            dummy.ensure(KUBE_IPVS0)
            rejected |= self._as_local(self._sets.change(map(_member, here), ()))
            rejected |= self._moved(
                here, dummy.change_addresses(KUBE_IPVS0, {key.address for key in here}, ())
            )
        return rejected

    def drop(self, keys: Iterable[Local]) -> Rejections:
        keys = list(keys)
        self._wanted -= {key.address for key in keys}
        return self._drop(keys)

    def _drop(self, keys: list[Local]) -> Rejections:
        if not keys:
            return {}
        failed: Mapping[Address, KernelError] = {}
        if dummy.exists(KUBE_IPVS0):
            failed = dummy.change_addresses(KUBE_IPVS0, (), {key.address for key in keys})
        rejected = self._moved(keys, failed)
        return rejected | self._as_local(self._sets.change((), map(_member, keys)))

    def _is_elsewhere(self, address: Address) -> bool:
        return Network(address, _SINGLE) in self._elsewhere

    @staticmethod
    def _moved(keys: Iterable[Local], failed: Mapping[Address, KernelError]) -> Rejections:
        return {key: failed[key.address] for key in keys if key.address in failed}

    @staticmethod
    def _as_local(rejected: Rejections) -> Rejections:
        return {
            Local(key.family, parse_address(key.text)): why
            for key, why in rejected.items()
            if isinstance(key, Member) and key.text
        }


def _member(key: Local) -> Member:
    return Member(key.family, set_name(sets.IPVS_IPS, key.family), format_address(key.address))
