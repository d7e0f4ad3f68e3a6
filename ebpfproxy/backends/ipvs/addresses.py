"""The addresses of Services that the node must treat as local, so that their packets reach IPVS.

They are on kube-ipvs0, a dummy device that stays down: no packet ever passes it. An address that another
device has is local anyway and is not put on kube-ipvs0: its removal from there, while the node still needs
it, would cut the node off (kubernetes issue 114815).

The addresses on kube-ipvs0 are also members of the set KUBE-IPVS-IPS. Rules with this set reject packets to
ports that no Service has.
"""

from collections.abc import Collection, Iterable, Mapping

from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Entry, Key, Local, Member
from ebpfproxy.backends.ipvs.sets import IpSets, Rejections, set_name
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.netlink import dummy, local_addresses
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.model.address import Address, Family, Network, family, format_address, parse_address

_SINGLE = 128


def on_device() -> frozenset[Address]:
    """Return the addresses on kube-ipvs0, empty if there is no such device. Raises KernelError."""
    try:
        return dummy.addresses(KUBE_IPVS0)
    except NotFound:
        return frozenset()


class Addresses:
    """Reads and changes these addresses, in the calling thread's network namespace.

    The addresses of other devices are those of the last read. The next read finds changes since then.
    """

    def __init__(self, ip_sets: IpSets) -> None:
        self._sets = ip_sets
        self._wanted: set[Address] = set()
        self._other_devices: frozenset[Network] = frozenset()

    def read(self, found: Mapping[Key, Entry], families: Collection[Family]) -> dict[Key, Entry]:
        """Return the entries of the addresses, and those of `found` that are not derived from addresses.
        `found`: the entries of the sets.
        """
        device, self._other_devices = on_device(), local_addresses.read()
        members = set()
        entries = {}
        for key, entry in found.items():
            if isinstance(key, Member) and sets.NAMES[key.set][0] == sets.IPVS_IPS:
                members.add(parse_address(key.text))
            else:
                entries[key] = entry
        for address in device | members | self._wanted:
            address_family = family(address)
            if address_family not in families:
                continue
            if self._is_on_other_device(address):
                correct = address not in device and address not in members
                relevant = address in self._wanted or not correct
            else:
                correct = address in device and address in members
                relevant = address in device or address in members
            if relevant:
                entries[Local(address_family, address)] = correct
        return entries

    def shared(self) -> frozenset[Address]:
        """Return the addresses of Services that another device currently has as well. Raises KernelError."""
        local = local_addresses.read()
        service_addresses = on_device() | self._wanted
        return frozenset(each for each in service_addresses if Network(each, _SINGLE) in local)

    def put(self, keys: Iterable[Local]) -> Rejections:
        keys = list(keys)
        self._wanted |= {key.address for key in keys}
        on_kube_ipvs0 = [key for key in keys if not self._is_on_other_device(key.address)]
        rejected = self._drop([key for key in keys if self._is_on_other_device(key.address)])
        if on_kube_ipvs0:
            dummy.ensure(KUBE_IPVS0)
            rejected |= self._set_rejections(self._sets.change(map(_member, on_kube_ipvs0), ()))
            rejected |= self._device_rejections(
                on_kube_ipvs0, dummy.change_addresses(KUBE_IPVS0, {key.address for key in on_kube_ipvs0}, ())
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
        rejected = self._device_rejections(keys, failed)
        return rejected | self._set_rejections(self._sets.change((), map(_member, keys)))

    def _is_on_other_device(self, address: Address) -> bool:
        return Network(address, _SINGLE) in self._other_devices

    @staticmethod
    def _device_rejections(keys: Iterable[Local], failed: Mapping[Address, KernelError]) -> Rejections:
        return {key: failed[key.address] for key in keys if key.address in failed}

    @staticmethod
    def _set_rejections(rejected: Rejections) -> Rejections:
        return {
            Local(key.family, parse_address(key.text)): failure
            for key, failure in rejected.items()
            if isinstance(key, Member) and key.text
        }


def _member(key: Local) -> Member:
    return Member(key.family, set_name(sets.IPVS_IPS, key.family), format_address(key.address))
