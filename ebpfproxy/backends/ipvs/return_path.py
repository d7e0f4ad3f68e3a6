"""The sysctls with which this node forwards what endpoints reply to untranslated packets.

Such a reply has an address of a Service as its source, which is also on kube-ipvs0. IPv4 drops packets with a
source that is local (martians), unless accept_local is set. The reverse path filter compares with the route
to the source, which is local, too: it drops the packet if it is strict, and on a device without an IPv4
address, such as those of pods often are, also if it is loose (__fib_validate_source() in
net/ipv4/fib_frontend.c). IPv6 has neither check.

So the filter is off at devices without an address that lead to endpoints, and loose at devices with one. For
all other devices it stays as it was. The greater value of a device and of "all" applies, so that "all" must
be 0, and its value moves to each device.

The values before the first change are the note of kube-ipvs0, so they are restored after any crash.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.backends.netfilter.sysctls import SETTING_CHANGED
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import dummy, links, owned_devices, routing
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Family, family
from ebpfproxy.model.device import Device

log = Logger(__name__)

_MARK = "ebpfproxy"
_MAX_NOTE = 255  # IFALIASZ, without the zero byte
_OFF, _STRICT, _LOOSE = 0, 1, 2
_WITHOUT_PACKETS = ("lo", KUBE_IPVS0)
_ACCEPT_LOCAL = "all/accept_local"
_ALL, _DEFAULT = "all/rp_filter", "default/rp_filter"
_GENERAL = (_ACCEPT_LOCAL, _ALL, _DEFAULT)


class _Change(NamedTuple):
    """One sysctl below net/ipv4/conf. `before` is to be restored."""

    name: str
    before: int
    wanted: int


def read(endpoints: Collection[Address]) -> bool | None:
    """Return whether the sysctls are as required for these endpoints. None if the agent has not set them.

    Raises KernelError.
    """
    return not any(_changes(endpoints)) if _noted() is not None else None


def ensure(endpoints: Collection[Address]) -> None:
    """Set the sysctls that differ, in the calling thread's network namespace. Raises KernelError."""
    dummy.ensure(KUBE_IPVS0)
    known = _noted()
    changes = list(_changes(endpoints))
    before = {each.name: each.before for each in changes} | (known or {})
    if known is None or before != known:
        owned_devices.set_note(KUBE_IPVS0, _note(before))
    for each in changes:
        with contextlib.suppress(NotFound):  # the device is gone
            if sysctl.ensure(_path(each.name), str(each.wanted)) and each.name == _ACCEPT_LOCAL:
                log.info(SETTING_CHANGED, name=_path(each.name), value=each.wanted)


def restore() -> bool:
    """Restore the values that the sysctls had before; return whether the agent had set them.

    Devices without an address get the default. Raises KernelError.
    """
    known = _noted()
    if known is None:
        return False
    default = known.get(_DEFAULT, _value(_DEFAULT))
    for name, has_address in _devices().items():
        with contextlib.suppress(NotFound):
            if not has_address and _value(name) == _OFF:
                sysctl.ensure(_path(name), str(default))
    for name, value in known.items():
        with contextlib.suppress(NotFound):
            sysctl.ensure(_path(name), str(value))
    owned_devices.set_note(KUBE_IPVS0, "")
    return True


def _changes(endpoints: Collection[Address]) -> Iterator[_Change]:
    """Yield the sysctls that differ, "all" last: the other devices then have its value already."""
    if (value := _value(_ACCEPT_LOCAL)) != 1:
        yield _Change(_ACCEPT_LOCAL, value, 1)
    of_all = _value(_ALL)
    outer = {routing.route_to(each).ifindex for each in endpoints if family(each) is Family.IPV4}
    for device in links.read():
        if device.name in _WITHOUT_PACKETS:
            continue
        name = _filter(device)
        try:
            value = _value(name)
        except KernelError:
            continue  # the device is gone
        wanted = max(of_all, value)
        if _has_address(device):
            wanted = _LOOSE if wanted == _STRICT else wanted
        elif device.ifindex in outer:
            wanted = _OFF
        if value != wanted:
            yield _Change(name, value, wanted)
    if (value := _value(_DEFAULT)) < of_all:
        yield _Change(_DEFAULT, value, of_all)
    if of_all:
        yield _Change(_ALL, of_all, _OFF)


def _devices() -> dict[str, bool]:
    """Return whether each device has an IPv4 address, by the name of its reverse path filter."""
    return {_filter(each): _has_address(each) for each in links.read() if each.name not in _WITHOUT_PACKETS}


def _filter(device: Device) -> str:
    return f"{device.name}/rp_filter"


def _has_address(device: Device) -> bool:
    return any(family(each) is Family.IPV4 for each in device.addresses)


def _note(before: Mapping[str, int]) -> str:
    """Return the note, without devices that are gone. It has room for about ten devices: those without an
    address are left out first, since `restore` sets them to the default.
    """
    devices = _devices()
    general = [name for name in before if name in _GENERAL]
    of_devices = [name for name in before if name in devices]
    text = _MARK
    for name in (*general, *sorted(of_devices, key=lambda each: (not devices[each], each))):
        word = f" {name}={before[name]}"
        if len(text) + len(word) <= _MAX_NOTE:
            text += word
    return text


def _noted() -> dict[str, int] | None:
    """Return the values before the first change; None if the agent has made none."""
    try:
        mark, *words = owned_devices.note(KUBE_IPVS0).split() or [""]
    except NotFound:
        return None
    if mark != _MARK:
        return None
    pairs = (word.rpartition("=") for word in words)
    return {name: int(value) for name, _, value in pairs if value.isdigit()}


def _value(name: str) -> int:
    return int(sysctl.read(_path(name)))


def _path(name: str) -> str:
    return f"net/ipv4/conf/{name}"
