"""NodePorts: what Services have on every address of a node, and the addresses, as what the kernel holds.
Pure.

See `entries` for why they are apart. `general` is what stands for all addresses, `special` what is on one. A
special virtual server takes the place of all that is general there, of members, too: what is said of the
NodePort is not said of who else has the port on that address.
"""

from collections.abc import Iterable, Iterator, Mapping

from ebpfproxy.backends.interface import Delta
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

Spread = Server | Member
"""What there may be a general one of."""


class Product:
    """What of it is in force. An external IP that is also an address of the node wins for its port."""

    def __init__(self) -> None:
        self._addresses: set[Address] = set()
        self._general: dict[Spread, Entry] = {}
        self._special: set[Spread] = set()  # those that are asked for by themselves

    def collapsed(self, found: Mapping[Key, Entry]) -> dict[Key, Entry]:
        """What the kernel holds, as entries. What is not there as it should be on every address is False.

        Of a fresh run, what is alike on all addresses is taken for a general one.
        """
        self._addresses = set(_addresses_in(found))
        result: dict[Key, Entry] = {}
        groups: dict[Spread, dict[Key, Entry]] = {}
        for key, entry in found.items():
            general = self._generalised(key)
            if general is None or key in self._special:
                result[key] = entry
            else:
                groups.setdefault(general, {})[key] = entry
        for general, parts in groups.items():
            entries = list(parts.values())
            complete = parts.keys() == self._places(general) and entries.count(entries[0]) == len(entries)
            if complete:
                result[general] = entries[0]
            elif general in self._general:
                result[general] = False
            else:
                result.update(parts)
        for general, entry in self._general.items():
            if not self._places(general):
                result[general] = entry  # indistinguishable
        self._remember(result)
        return result

    def expanded(self, delta: Delta[Key, Entry]) -> Delta[Key, Entry]:
        """The same change as what is to be put and dropped in the kernel; it is taken for done then."""
        before, self._addresses = self._addresses, self._addresses_after(delta)
        puts: dict[Key, Entry] = {}
        drops: set[Key] = set()
        for key in delta.drops:
            if isinstance(key, Spread) and is_general(key):
                self._general.pop(key, None)
                drops |= _specials(key, before)
            else:
                if isinstance(key, Spread):
                    self._special.discard(key)
                drops.add(key)
        for key, entry in delta.puts.items():
            if isinstance(key, Spread) and is_general(key):
                self._general[key] = entry
            elif isinstance(key, Spread):
                self._special.add(key)
        moved = self._addresses != before
        for general in self._general if moved else delta.puts.keys() & self._general.keys():
            assert isinstance(general, Spread)
            drops |= _specials(general, before - self._addresses)
            new = self._addresses if general in delta.puts else self._addresses - before
            puts.update(dict.fromkeys(self._spread(general, new), self._general[general]))
        puts.update((key, entry) for key, entry in delta.puts.items() if not _is_general(key))
        drops |= self._members_beside(delta.puts.keys() | delta.drops) - puts.keys()
        for key in list(drops):
            if key in self._special:
                drops.discard(key)
            elif not self._gives_way(key) and (covering := self._generalised(key)) in self._general:
                assert covering is not None
                drops.discard(key)
                puts.setdefault(key, self._general[covering])
        return Delta(puts, frozenset(drops))

    def asked_for(self, key: Key) -> Key:
        """Because of which entry something is in the kernel, or should be."""
        general = self._generalised(key)
        return general if general in self._general and key not in self._special and general else key

    def _remember(self, entries: Mapping[Key, Entry]) -> None:
        spread = {key: entry for key, entry in entries.items() if isinstance(key, Spread)}
        self._general = {key: entry for key, entry in spread.items() if is_general(key)}
        self._special = spread.keys() - self._general.keys()

    def _generalised(self, key: Key) -> Spread | None:
        """The general one of what is on an address of ours; None for all else."""
        if isinstance(key, Server):
            if key.frontend.address in self._addresses:
                return key._replace(frontend=key.frontend._replace(address=unspecified(key.family)))
        elif isinstance(key, Member) and sets.NAMES[key.set][0] in sets.BY_PLACE:
            address, _, port = key.text.partition(",")
            if parse_address(address) in self._addresses:
                return key._replace(text=sets.ANYWHERE[key.family] + port)
        return None

    def _places(self, general: Spread) -> set[Key]:
        """Where it stands."""
        return self._spread(general, self._addresses)

    def _spread(self, general: Spread, addresses: Iterable[Address]) -> set[Key]:
        expanded = _specials(general, addresses) - self._special
        return {key for key in expanded if not self._gives_way(key)}

    def _gives_way(self, key: Key) -> bool:
        """Whether a member of a general one stands where a special virtual server does."""
        return isinstance(key, Member) and key not in self._special and _server_at(key) in self._special

    def _members_beside(self, changed: Iterable[Key]) -> set[Key]:
        """Those of general ones where a special virtual server has come or gone."""
        places = {
            sets.place(*key.frontend)
            for key in changed
            if isinstance(key, Server) and key.frontend.address in self._addresses
        }
        if not places:
            return set()
        general = (key for key in self._general if isinstance(key, Member))
        found = (each for key in general for each in _specials(key, self._addresses))
        return {key for key in found if isinstance(key, Member) and key.text in places}

    def _addresses_after(self, delta: Delta[Key, Entry]) -> set[Address]:
        return (self._addresses - set(_addresses_in(delta.drops))) | set(_addresses_in(delta.puts))


def is_general(key: Spread) -> bool:
    if isinstance(key, Server):
        return is_unspecified(key.frontend.address)
    return key.text.startswith(sets.ANYWHERE[key.family])


def _server_at(member: Member) -> Server | None:
    """The inverse of `sets.place`; None for a member of a set that has no ports, or of a protocol that no
    Service has, which another program has put there."""
    if sets.NAMES[member.set][0] not in sets.BY_PLACE:
        return None
    address, _, rest = member.text.partition(",")
    name, _, port = rest.partition(":")
    protocol = Protocol.__members__.get(name.upper())
    return Server(member.family, Frontend(parse_address(address), int(port), protocol)) if protocol else None


def _is_general(key: Key) -> bool:
    return isinstance(key, Spread) and is_general(key)


def _addresses_in(keys: Iterable[Key]) -> Iterator[Address]:
    """Those that NodePorts answer on."""
    for key in keys:
        if isinstance(key, Member) and sets.NAMES[key.set][0] == sets.NODE_PORT_IP:
            yield parse_address(key.text)


def _specials(general: Spread, addresses: Iterable[Address]) -> set[Key]:
    own = [address for address in addresses if family(address) is general.family]
    if isinstance(general, Server):
        return {general._replace(frontend=general.frontend._replace(address=each)) for each in own}
    port = general.text.removeprefix(sets.ANYWHERE[general.family])
    return {general._replace(text=f"{format_address(each)},{port}") for each in own}
