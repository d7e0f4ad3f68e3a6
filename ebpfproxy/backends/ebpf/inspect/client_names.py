"""Names of clients on the socket path, which knows only their network namespace."""

import contextlib
import time

from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import local_addresses
from ebpfproxy.linux.netns import namespaces, netns
from ebpfproxy.model.address import Address, Family, family, format_address, is_loopback

_REREAD_SECONDS = 1.0
_LENGTH = 128  # of a network that is one address
_LINK_LOCAL = b"\xfe\x80"


class ClientNames:
    """The name of each network namespace: "node", an address of the pod, or "netns" and the cookie."""

    def __init__(self, node_cookie: int) -> None:
        self._names = {node_cookie: "node"} if node_cookie else {}
        self._addresses: dict[int, frozenset[str]] = {}
        self._read_at = 0.0

    def name(self, cookie: int) -> str:
        """The namespaces are read again if the cookie is unknown, at most once per second."""
        if cookie not in self._names:
            self._read()
        return self._names.get(cookie, f"netns {cookie}")

    def has_address(self, cookie: int, address: str) -> bool:
        """Whether the namespace has this address. Its text is canonical."""
        self.name(cookie)
        return address in self._addresses.get(cookie, ())

    def _read(self) -> None:
        now = time.monotonic()
        if now - self._read_at < _REREAD_SECONDS:
            return
        self._read_at = now
        # Without CAP_SYS_ADMIN, or before Linux 5.14, the cookies are shown.
        with (
            contextlib.suppress(KernelError),
            contextlib.closing(namespaces.opened_network_namespaces()) as opened,
        ):
            for descriptor in opened:
                # One may be about to end: the others count all the same.
                with contextlib.suppress(KernelError), namespaces.in_namespace(descriptor):
                    self._add(netns.cookie(), _addresses())

    def _add(self, cookie: int, addresses: list[Address]) -> None:
        texts = [format_address(address) for address in addresses]
        self._addresses[cookie] = frozenset(texts)
        if texts:
            self._names.setdefault(cookie, texts[0])


def _addresses() -> list[Address]:
    """The addresses of the thread's network namespace: IPv4 first, without loopback and link-local ones."""
    found = [
        each.address
        for each in local_addresses.read()
        if each.length == _LENGTH
        and not is_loopback(each.address)
        and not each.address.startswith(_LINK_LOCAL)
    ]
    return sorted(found, key=lambda address: (family(address) is Family.IPV6, address))
