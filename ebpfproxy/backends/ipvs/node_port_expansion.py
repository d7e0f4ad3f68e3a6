"""Expands NodePorts to virtual servers and members on each address of the node, and reverts it. Pure.

See `entries` for the reason. A *general* key has the unspecified address and applies to all addresses that
NodePorts answer on. A *specific* key has one address. A specific virtual server replaces everything general
at its address and port, including members: the members of a NodePort do not apply to another frontend with
the same port on that address.
"""

from collections.abc import Iterable, Iterator, Mapping

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Entry, Key, Member, Server
from ebpfproxy.model.address import (
    Address,
    Protocol,
    family,
    format_address,
    is_unspecified,
    parse_address,
    unspecified,
)
from ebpfproxy.plan.service_plan import Frontend

Expandable = Server | Member
"""The keys that may be general."""


class NodePortExpansion:
    """The general and specific keys in force. An external IP that is also an address of the node takes
    precedence for its port.
    """

    def __init__(self) -> None:
        self._addresses: set[Address] = set()
        self._general: dict[Expandable, Entry] = {}
        self._specific: set[Expandable] = set()  # specific keys that a plan rendered

    def collapse(self, found: Mapping[Key, Entry]) -> dict[Key, Entry]:
        """Convert kernel objects into entries. A general entry that is incomplete or not equal on all
        addresses becomes False.

        In a fresh run, objects that are equal on all addresses become a general entry.
        """
        self._addresses = set(_addresses_in(found))
        result: dict[Key, Entry] = {}
        groups: dict[Expandable, dict[Key, Entry]] = {}
        for key, entry in found.items():
            general = self._general_key(key)
            if general is None or key in self._specific:
                result[key] = entry
            else:
                groups.setdefault(general, {})[key] = entry
        for general, parts in groups.items():
            entries = list(parts.values())
            equal = entries.count(entries[0]) == len(entries)
            if equal and parts.keys() == self._expansion_of(general):
                result[general] = entries[0]
            elif general in self._general:
                result[general] = False
            else:
                result.update(parts)
        for general, entry in self._general.items():
            if not self._expansion_of(general):
                result[general] = entry  # without addresses, the kernel has nothing that could differ
        self._remember(result)
        return result

    def expand(self, delta: Delta[Key, Entry]) -> Delta[Key, Entry]:
        """Convert a delta of entries into a delta of kernel objects, and record it as applied."""
        before, self._addresses = self._addresses, self._addresses_after(delta)
        puts: dict[Key, Entry] = {}
        drops: set[Key] = set()
        for key in delta.drops:
            if isinstance(key, Expandable) and is_general(key):
                self._general.pop(key, None)
                drops |= _specific_keys(key, before)
            else:
                if isinstance(key, Expandable):
                    self._specific.discard(key)
                drops.add(key)
        for key, entry in delta.puts.items():
            if isinstance(key, Expandable) and is_general(key):
                self._general[key] = entry
            elif isinstance(key, Expandable):
                self._specific.add(key)
        addresses_changed = self._addresses != before
        for general in self._general if addresses_changed else delta.puts.keys() & self._general.keys():
            assert isinstance(general, Expandable)
            drops |= _specific_keys(general, before - self._addresses)
            new = self._addresses if general in delta.puts else self._addresses - before
            puts.update(dict.fromkeys(self._expand_to(general, new), self._general[general]))
        puts.update((key, entry) for key, entry in delta.puts.items() if not _is_general(key))
        drops |= self._affected_members(delta.puts.keys() | delta.drops) - puts.keys()
        for key in list(drops):
            if key in self._specific:
                drops.discard(key)
            elif not self._is_replaced(key) and (replacement := self._general_key(key)) in self._general:
                assert replacement is not None
                drops.discard(key)
                puts.setdefault(key, self._general[replacement])
        return Delta(puts, frozenset(drops))

    def entry_of(self, key: Key) -> Key:
        """Return the key of the entry that a kernel object belongs to."""
        general = self._general_key(key)
        return general if general in self._general and key not in self._specific and general else key

    def _remember(self, entries: Mapping[Key, Entry]) -> None:
        expandable = {key: entry for key, entry in entries.items() if isinstance(key, Expandable)}
        self._general = {key: entry for key, entry in expandable.items() if is_general(key)}
        self._specific = expandable.keys() - self._general.keys()

    def _general_key(self, key: Key) -> Expandable | None:
        """Return the general key of an object on a NodePort address; None for all others."""
        if isinstance(key, Server):
            if key.frontend.address in self._addresses:
                return key._replace(frontend=key.frontend._replace(address=unspecified(key.family)))
        elif isinstance(key, Member) and sets.NAMES[key.set][0] in sets.WITH_PORT:
            address, _, port = key.text.partition(",")
            if parse_address(address) in self._addresses:
                return key._replace(text=sets.ANYWHERE[key.family] + port)
        return None

    def _expansion_of(self, general: Expandable) -> set[Key]:
        """Return the specific keys of a general key on all addresses."""
        return self._expand_to(general, self._addresses)

    def _expand_to(self, general: Expandable, addresses: Iterable[Address]) -> set[Key]:
        keys = _specific_keys(general, addresses) - self._specific
        return {key for key in keys if not self._is_replaced(key)}

    def _is_replaced(self, key: Key) -> bool:
        """Return whether a general key's member is at the address and port of a specific virtual server."""
        return isinstance(key, Member) and key not in self._specific and _server_at(key) in self._specific

    def _affected_members(self, changed: Iterable[Key]) -> set[Key]:
        """Return the members of general keys where a specific virtual server was added or removed."""
        texts = {
            sets.member_text(*key.frontend)
            for key in changed
            if isinstance(key, Server) and key.frontend.address in self._addresses
        }
        if not texts:
            return set()
        general = (key for key in self._general if isinstance(key, Member))
        found = (each for key in general for each in _specific_keys(key, self._addresses))
        return {key for key in found if isinstance(key, Member) and key.text in texts}

    def _addresses_after(self, delta: Delta[Key, Entry]) -> set[Address]:
        return (self._addresses - set(_addresses_in(delta.drops))) | set(_addresses_in(delta.puts))


def is_general(key: Expandable) -> bool:
    if isinstance(key, Server):
        return is_unspecified(key.frontend.address)
    return key.text.startswith(sets.ANYWHERE[key.family])


def _server_at(member: Member) -> Server | None:
    """Return the server key of a member: the inverse of `sets.member_text`.

    None for a set without ports, or for a protocol that no Service has, which another program has added.
    """
    if sets.NAMES[member.set][0] not in sets.WITH_PORT:
        return None
    address, _, rest = member.text.partition(",")
    name, _, port = rest.partition(":")
    protocol = Protocol.__members__.get(name.upper())
    return Server(member.family, Frontend(parse_address(address), int(port), protocol)) if protocol else None


def _is_general(key: Key) -> bool:
    return isinstance(key, Expandable) and is_general(key)


def _addresses_in(keys: Iterable[Key]) -> Iterator[Address]:
    """Yield the addresses that NodePorts answer on."""
    for key in keys:
        if isinstance(key, Member) and sets.NAMES[key.set][0] == sets.NODE_PORT_IP:
            yield parse_address(key.text)


def _specific_keys(general: Expandable, addresses: Iterable[Address]) -> set[Key]:
    own = [address for address in addresses if family(address) is general.family]
    if isinstance(general, Server):
        return {general._replace(frontend=general.frontend._replace(address=each)) for each in own}
    port = general.text.removeprefix(sets.ANYWHERE[general.family])
    return {general._replace(text=f"{format_address(each)},{port}") for each in own}
