"""What endpoints on this node have for untranslated packets in their network namespaces: devices and sysctls.

- For each endpoint a dummy device with the addresses of its Services, like kube-ipvs0 on the node. The
  endpoint must not answer ARP for these addresses, nor announce them: the sysctls arp_ignore and arp_announce
  of the device that has the endpoint's own address. IPv6 needs none, since a device answers only for its own
  addresses.
- With tunnels also a tunnel device, which removes the outer header. Its reverse path filter must accept
  clients whose replies leave by another device. It must not forward: a node may send packets before the
  endpoint has the address of a new Service, and where IPv4 forwarding is on, as in most pods (they inherit
  it from the node), they would return to the endpoint's own node, which selects another endpoint. IPv6
  forwarding is off in a new namespace.

All of this is in the kernel alone: the note of each device names the network namespace of the node, so that
agents of several nodes on one machine do not change each other's, and that of the dummy device also the
endpoint and what the sysctls were before. A namespace that ends takes it along.

An address that a connected TCP socket uses stays until the connection ends, as a real server without new
connections does (`servers`). It then lingers: it is not read as an entry, and `release` removes it.

Functions with a `Namespace` act in the one that the calling thread has entered.
"""

import contextlib
import hashlib
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.ipvs.entries import EndpointKey, PodAddress, Tunnel
from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Unsupported
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import dummy, iproute, owned_devices
from ebpfproxy.linux.netlink.owned_devices import DUMMY, DUMMY_ADDRESS, TUNNELS, OwnedDevice
from ebpfproxy.linux.netns import namespaces, netns
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.sockets import State
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Family, Protocol, family, format_address, parse_address

_ADDRESSES = {Family.IPV4: "ebpv4-", Family.IPV6: "ebpv6-"}
_TUNNELS = {Family.IPV4: "ebpt4-", Family.IPV6: "ebpt6-"}
_PREFIXES = (*_ADDRESSES.values(), *_TUNNELS.values())
_ARP = {"arp_ignore": 1, "arp_announce": 2}
"""The least value of each sysctl."""
_OF_TUNNEL = {"rp_filter": "2", "forwarding": "0"}

_CONNECTED = (
    *(State.ESTABLISHED, State.SYN_RECV, State.FIN_WAIT1, State.FIN_WAIT2),
    *(State.CLOSE_WAIT, State.LAST_ACK, State.CLOSING),
)

Rejections = dict[EndpointKey, KernelError]


class Namespace(NamedTuple):
    """The network namespace that the calling thread has entered.

    `node`: see `node_identity`. `owned`: the agent's devices. `unfinished`: devices without a note, because
    the agent of this or another node creates them now, or ended meanwhile. `own`: the ifindex of each address
    of other devices. `on_device`: the addresses of each device, by ifindex.
    """

    node: str
    owned: list[OwnedDevice]
    unfinished: list[OwnedDevice]
    own: Mapping[Address, int]
    on_device: Mapping[int, set[Address]]


def node_identity() -> str:
    """Return how notes begin: with the name of this program, and the identity of the node. That is the one of
    the calling thread's network namespace, until the next boot.
    """
    found = namespaces.identity_of("/proc/thread-self/ns/net")
    return f"ebpfproxy/netns:{found[1]}" if found else ""


@contextlib.contextmanager
def entered(path: str) -> Iterator[Namespace | None]:
    """Run the block in a network namespace. None if it is gone or may not be entered. The calling thread is
    in the node's.
    """
    identity = node_identity()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(netns.entered(Path(path)))
            devices = owned_devices.read(*_PREFIXES)
            owned = [each for each in devices if each.note.partition(" ")[0] == identity]
            on_device = owned_devices.addresses()
        except KernelError:
            yield None
            return
        of_agents = {device.ifindex for device in devices}
        own = {
            address: ifindex
            for ifindex, addresses in on_device.items()
            if ifindex not in of_agents
            for address in addresses
        }
        yield Namespace(identity, owned, [each for each in devices if not each.note], own, on_device)


def _name(prefixes: Mapping[Family, str], endpoint: Address) -> str:
    """Return the name of an endpoint's device. Device names have at most 15 characters."""
    return prefixes[family(endpoint)] + hashlib.blake2b(endpoint, digest_size=4).hexdigest()


def entries_in(found: Namespace) -> Iterator[tuple[EndpointKey, bool]]:
    """Yield what endpoints have, and whether it is in the desired form."""
    for device in found.owned:
        if device.local:
            yield Tunnel(family(device.local), device.local), device.up and _tunnel_accepts(device, found)
            continue
        note = _Note.parse(device.note)
        if note is None:
            continue  # another program has changed it
        is_correct = family(note.endpoint) is Family.IPV6 or _arp_is_quiet(note.device)
        for address in found.on_device.get(device.ifindex, ()):
            yield PodAddress(family(address), note.endpoint, address), is_correct


def put_devices(endpoint: Address, keys: set[EndpointKey], found: Namespace) -> Rejections:
    """Create or repair what the keys of one endpoint name."""
    rejected: Rejections = {}
    addresses = {key.address: key for key in keys if isinstance(key, PodAddress)}
    tunnels = [key for key in keys if isinstance(key, Tunnel)]
    try:
        if addresses:
            name = _put_device(endpoint, found)
            failed = dummy.change_addresses(name, addresses.keys())
            rejected.update((addresses[address], failure) for address, failure in failed.items())
    except KernelError as failure:
        rejected.update(dict.fromkeys(addresses.values(), failure))
    for key in tunnels:
        try:
            _put_tunnel(endpoint, found)
        except KernelError as failure:
            rejected[key] = failure
    return rejected


def _put_device(endpoint: Address, found: Namespace) -> str:
    """Create the dummy device of an endpoint if it is missing, and set the sysctls of ARP."""
    name = _name(_ADDRESSES, endpoint)
    known = next((each for each in found.owned if each.name == name), None)
    note = known and _Note.parse(known.note)
    if not note:
        _create(name, DUMMY)
        note = _Note.now(found.node, endpoint, iproute.device_name(found.own[endpoint]))
        owned_devices.set_note(name, str(note))
    if family(endpoint) is Family.IPV4:
        for setting, least in _ARP.items():
            if _effective(note.device, setting) < least:
                sysctl.ensure(_path(note.device, setting), str(least))
    return name


def _create(name: str, kind: str, local: Address | None = None) -> None:
    """Create a device that has no note yet, also if it exists because its creation was interrupted."""
    try:
        owned_devices.create(name, kind, local)
    except AlreadyExists:
        if owned_devices.note(name):
            raise


def _put_tunnel(endpoint: Address, found: Namespace) -> None:
    name = _name(_TUNNELS, endpoint)
    known = next((each for each in found.owned if each.name == name), None)
    if known and not known.up:
        owned_devices.delete(name)
    if not known or not known.up:
        _create(name, TUNNELS[family(endpoint)], endpoint)
        owned_devices.set_note(name, found.node)
    if family(endpoint) is Family.IPV4:
        # On a device without an address, even a loose filter drops packets of clients behind other devices.
        owned_devices.add_dummy_address(name)
        for setting, value in _OF_TUNNEL.items():
            sysctl.ensure(_path(name, setting), value)
    else:
        sysctl.ensure(f"net/ipv6/conf/{name}/disable_ipv6", "0")


def drop_devices(endpoint: Address, keys: set[EndpointKey], found: Namespace) -> set[EndpointKey]:
    """Remove what the keys name, and return those that linger because a connection uses the address. Raises
    KernelError.
    """
    leaving = {key.address for key in keys if isinstance(key, PodAddress)}
    used = used_addresses(found)
    lingering: set[EndpointKey] = {
        key for key in keys if (key.address in used if isinstance(key, PodAddress) else bool(used))
    }
    for device in found.owned:
        if device.name == _name(_ADDRESSES, endpoint):
            present = found.on_device.get(device.ifindex, set())
            if present <= leaving - used:
                delete_device(device)
            else:
                for failure in dummy.change_addresses(device.name, (), leaving - used).values():
                    raise failure
        elif device.name == _name(_TUNNELS, endpoint) and any(
            isinstance(key, Tunnel) for key in keys - lingering
        ):
            delete_device(device)
    return lingering


def delete_device(device: OwnedDevice) -> None:
    """Delete a device, and restore the sysctls in its note. Raises KernelError."""
    if note := _Note.parse(device.note):
        note.restore()
    owned_devices.delete(device.name)


def used_addresses(found: Namespace) -> set[Address]:
    """Return the addresses of the agent's devices that connected TCP sockets have as their own."""
    addresses = {each for device in found.owned for each in found.on_device.get(device.ifindex, ())}
    with contextlib.suppress(Unsupported):
        return addresses & {sock.source for sock in sockets.read(Protocol.TCP, _CONNECTED)}
    return set()


class _Note(NamedTuple):
    """The node, the endpoint's address and its device, and the sysctls of that before the first change."""

    node: str
    endpoint: Address
    device: str
    before: Mapping[str, str]

    def __str__(self) -> str:
        settings = (f"{name}={value}" for name, value in self.before.items())
        return " ".join([self.node, format_address(self.endpoint), self.device, *settings])

    @classmethod
    def parse(cls, text: str) -> "_Note | None":
        try:
            node, address, device, *settings = text.split()
            pairs = dict(each.split("=", 1) for each in settings)
            return cls(node, parse_address(address), device, pairs)
        except ValueError:  # that of a tunnel device, or not the agent's
            return None

    @classmethod
    def now(cls, node: str, endpoint: Address, device: str) -> "_Note":
        if family(endpoint) is Family.IPV6:
            return cls(node, endpoint, device, {})
        return cls(node, endpoint, device, {name: str(_value(device, name)) for name in _ARP})

    def restore(self) -> None:
        """Restore the sysctls that still have the values that the agent set."""
        for name, value in self.before.items():
            with contextlib.suppress(NotFound):  # the device is gone
                if _value(self.device, name) == _ARP.get(name):
                    sysctl.ensure(_path(self.device, name), value)


def _arp_is_quiet(device: str) -> bool:
    return all(_effective(device, name) >= least for name, least in _ARP.items())


def _tunnel_accepts(device: OwnedDevice, found: Namespace) -> bool:
    try:
        if device.kind == TUNNELS[Family.IPV4]:
            has_address = DUMMY_ADDRESS in found.on_device.get(device.ifindex, ())
            filtered = _effective(device.name, "rp_filter") == int(_OF_TUNNEL["rp_filter"])
            return has_address and filtered and not _value(device.name, "forwarding")
        return sysctl.read(f"net/ipv6/conf/{device.name}/disable_ipv6") == "0"
    except KernelError:
        return False


def _effective(device: str, name: str) -> int:
    """Return the value in force: the greater one of the device and all devices. 0 if the device is gone."""
    try:
        return max(_value("all", name), _value(device, name))
    except KernelError:
        return 0


def _value(device: str, name: str) -> int:
    return int(sysctl.read(_path(device, name)))


def _path(device: str, name: str) -> str:
    return f"net/ipv4/conf/{device}/{name}"


log = Logger(__name__)

NO_NAMESPACE = "No network namespace has the address of an endpoint on this node"
"""The endpoint gets no packets with direct routing or a tunnel. Its pod is ending, or its address is not on a
device of its own; or the agent may not see it, which requires hostPID and CAP_SYS_PTRACE."""


class EndpointNetworks:
    """Reads and changes the network namespaces of endpoints of this node."""

    def __init__(self) -> None:
        self._wanted: set[EndpointKey] = set()  # put, or read: a previous run may have put them
        self._lingering: set[EndpointKey] = set()
        self._paths: dict[Address, str] = {}
        self._missing: set[Address] = set()  # reported endpoints
        self._is_empty = False  # whether no namespace has a device of the agent

    @property
    def endpoints(self) -> frozenset[Address]:
        """The endpoints that need something."""
        return frozenset(key.endpoint for key in self._wanted)

    def read(self, families: Collection[Family]) -> dict[EndpointKey, bool]:
        """Return the entries. Those of an endpoint that has no namespace count as they should be: there is
        nothing that could differ.
        """
        if self._is_empty and not self._wanted and not self._lingering:
            return {}
        self.release()
        entries: dict[EndpointKey, bool] = {}
        present: set[Address] = set()
        self._is_empty = True
        for path in namespaces.network_namespaces():
            with entered(path) as found:
                if found is None:
                    self._is_empty = False  # it may have a device
                    continue
                self._is_empty = self._is_empty and not found.owned
                present |= found.own.keys()
                self._paths.update(dict.fromkeys(found.own.keys() & self.endpoints, path))
                entries.update((key, entry) for key, entry in entries_in(found) if key.family in families)
        for key in self._lingering:
            entries.pop(key, None)
        self._wanted |= entries.keys()
        self._report_missing(self.endpoints - present)
        return entries | {key: True for key in self._wanted if key.endpoint not in present}

    def put(self, keys: Iterable[EndpointKey]) -> Rejections:
        keys = set(keys)
        self._wanted |= keys
        self._lingering -= keys
        rejected: Rejections = {}
        by_endpoint = _by_endpoint(keys)
        # An exception would leave the generator, and so this thread, in the namespace of an endpoint.
        with contextlib.closing(self._visit(by_endpoint.copy())) as visits:
            for endpoint, found in visits:
                rejected |= put_devices(endpoint, by_endpoint.pop(endpoint), found)
        self._is_empty = False
        self._report_missing(self._missing | by_endpoint.keys())
        return rejected

    def drop(self, keys: Iterable[EndpointKey]) -> Rejections:
        keys = set(keys)
        self._wanted -= keys
        return self._drop(keys)

    def release(self) -> None:
        """Remove the addresses that only connections kept which have ended since. What the kernel refuses to
        remove is retried at the next call.
        """
        if self._lingering:
            self._lingering |= self._drop(self._lingering.copy()).keys()

    def _drop(self, keys: set[EndpointKey]) -> Rejections:
        rejected: Rejections = {}
        self._lingering -= keys
        by_endpoint = _by_endpoint(keys)
        with contextlib.closing(self._visit(by_endpoint)) as visits:
            for endpoint, found in visits:
                leaving = by_endpoint[endpoint]
                try:
                    self._lingering |= drop_devices(endpoint, leaving, found)
                except KernelError as failure:
                    rejected.update(dict.fromkeys(leaving, failure))
        return rejected

    def _visit(self, endpoints: Collection[Address]) -> Generator[tuple[Address, Namespace]]:
        """Yield each endpoint with its namespace, which the calling thread has entered meanwhile. Endpoints
        without a namespace are left out.
        """
        left = set(endpoints)
        for endpoint in sorted(left):
            if path := self._paths.get(endpoint):
                with entered(path) as found:
                    if found and endpoint in found.own:
                        left.discard(endpoint)
                        yield endpoint, found
                        continue
                self._paths.pop(endpoint, None)
        for path in namespaces.network_namespaces() if left else ():
            with entered(path) as found:
                for endpoint in sorted(left.intersection(found.own)) if found else ():
                    left.discard(endpoint)
                    self._paths[endpoint] = path
                    assert found
                    yield endpoint, found
            if not left:
                return

    def _report_missing(self, endpoints: Collection[Address]) -> None:
        for endpoint in sorted(set(endpoints) - self._missing):
            log.warning(
                NO_NAMESPACE,
                endpoint=format_address(endpoint),
                hint="run the agent with hostPID and CAP_SYS_PTRACE, or set --ipvs-forwarding=nat",
            )
        self._missing = set(endpoints)


def leftovers() -> list[str]:
    """Return the paths of the network namespaces that have devices of the agent. Raises KernelError."""
    paths = []
    for path in namespaces.network_namespaces():
        with entered(path) as found:
            if found and (found.owned or found.unfinished):
                paths.append(path)
    return paths


def remove(path: str, only_unused: bool = False) -> set[Address]:
    """Remove the agent's devices from a network namespace, and restore its sysctls. Raises KernelError.

    With `only_unused`, nothing is removed while connected TCP sockets use addresses of these devices. Return
    those addresses.
    """
    with entered(path) as found:
        used = used_addresses(found) if found and only_unused else set()
        for device in (*found.owned, *found.unfinished) if found and not used else ():
            delete_device(device)
        return used


def _by_endpoint(keys: Iterable[EndpointKey]) -> dict[Address, set[EndpointKey]]:
    found: dict[Address, set[EndpointKey]] = {}
    for key in keys:
        found.setdefault(key.endpoint, set()).add(key)
    return found
