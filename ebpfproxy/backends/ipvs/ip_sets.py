"""Reads and changes the ipsets in the kernel, for both families."""

import contextlib
from collections.abc import Iterable, Mapping

from ebpfproxy.backends.ipvs.entries import Entry, Key, Member, Set
from ebpfproxy.backends.ipvs.sets import NAMES, SETS, ip_set
from ebpfproxy.errors import AlreadyExists, KernelError, Rejected, Unsupported
from ebpfproxy.linux import ipset
from ebpfproxy.linux.ipset import IpSet, Stored
from ebpfproxy.model.address import Family

Rejections = dict[Key, KernelError]


def create_all(family: Family) -> None:
    """Create the sets that do not exist. Raises KernelError."""
    for failure in ipset.change(ipset.creation(ip_set(base, family)) for base in SETS).values():
        raise failure


def exist() -> bool:
    """Return whether any of the sets exists. Raises Rejected."""
    with contextlib.suppress(Unsupported):
        return not NAMES.keys().isdisjoint(ipset.elements())
    return False


class IpSets:
    """The ipsets in the calling thread's network namespace. Sets with other names are ignored."""

    def __init__(self) -> None:
        self._known: dict[str, Stored] = {}  # without members

    def read(self, families: Iterable[Family]) -> dict[Key, Entry]:
        """Return the entries of the sets and their members. A set of another type or family has the entry
        False and no members.

        Raises KernelError.
        """
        served = tuple(families)
        self._known = {}
        found: dict[Key, Entry] = {}
        names = [name for name in ipset.elements() if name in NAMES and NAMES[name][1] in served]
        for name, stored in ipset.read(names).items():
            base, family = NAMES[name]
            self._known[name] = stored._replace(members=frozenset())
            matches = _accept_same_members(stored, ip_set(base, family))
            found[Set(family, name)] = stored.type if matches else False
            found.update((Member(family, name, text), True) for text in stored.members if matches)
        return found

    def create(self, keys: Iterable[Set]) -> Rejections:
        """Create the sets that do not exist. A set of another type is rejected, since rules would still refer
        to the old one.
        """
        keys = list(keys)
        made = [key for key in keys if key.name not in self._known]
        failed = ipset.change(ipset.creation(ip_set(*NAMES[key.name])) for key in made)
        rejected: Rejections = {made[position]: failure for position, failure in failed.items()}
        present = ipset.read(made[at].name for at, why in failed.items() if isinstance(why, AlreadyExists))
        for key in keys:
            desired = ip_set(*NAMES[key.name])
            if key.name in present:  # another program has created it since the last read
                self._known[key.name] = present[key.name]
                del rejected[key]
            elif key not in rejected:
                self._known.setdefault(key.name, Stored(desired.type, desired.family, frozenset()))
            if failure := self._mismatch(key.name):
                rejected[key] = failure
        return rejected

    def change(self, puts: Iterable[Member], drops: Iterable[Member]) -> Rejections:
        """Add and remove members of several sets at once."""
        rejected: Rejections = {}
        changes = [("del", key) for key in drops if key.set in self._known] + [("add", key) for key in puts]
        for _, key in changes:
            if failure := self._mismatch(key.set):
                rejected[key] = failure
        changes = [(command, key) for command, key in changes if key not in rejected]
        failed = ipset.change(f"{command} {key.set} {key.text}" for command, key in changes)
        return rejected | {changes[position][1]: failure for position, failure in failed.items()}

    def destroy(self, keys: Iterable[Set]) -> Rejections:
        keys = list(keys)
        failed = ipset.change(f"destroy {key.name}" for key in keys)
        for position, key in enumerate(keys):
            if position not in failed:
                self._known.pop(key.name, None)
        return {keys[position]: failure for position, failure in failed.items()}

    def generation(self) -> Mapping[str, int]:
        """Return the number of members of each set."""
        return {name: number for name, number in ipset.elements().items() if name in NAMES}

    def _mismatch(self, name: str) -> Rejected | None:
        """Return why no member of a set can be changed, None if its type is right or unknown."""
        existing, desired = self._known.get(name), ip_set(*NAMES[name])
        if existing is None or _accept_same_members(existing, desired):
            return None
        return Rejected(
            f"cannot create ipset {name}: it exists as {_described(existing)}, not {_described(desired)}",
            f"remove the rules that iptables-save shows with it, then: ipset destroy {name}",
        )


def _accept_same_members(one: Stored, other: IpSet) -> bool:
    """Return whether both sets accept the same members."""
    return (one.type, one.family) == (other.type, other.family)


def _described(one: Stored | IpSet) -> str:
    return f"{one.type} of {one.family.value}" if one.family else one.type
