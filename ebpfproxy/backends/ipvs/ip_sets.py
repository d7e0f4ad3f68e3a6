"""Reads and changes the ipsets in the kernel, for both families."""

from collections.abc import Iterable, Iterator, Mapping

from ebpfproxy.backends.ipvs.entries import Entry, Key, Member, Set
from ebpfproxy.backends.ipvs.sets import NAMES, SETS, ip_set
from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.ipset import ipset
from ebpfproxy.linux.ipset.ipset import Change
from ebpfproxy.linux.ipset.messages import IpSet
from ebpfproxy.model.address import Family

Rejections = dict[Key, KernelError]


def create_all(family: Family) -> None:
    """Create the sets that do not exist. Raises KernelError."""
    for base in SETS:
        ipset.create(ip_set(base, family))


class IpSets:
    """The ipsets in the calling thread's network namespace. Sets with other names are ignored."""

    def __init__(self) -> None:
        self._known: dict[str, IpSet] = {}

    def read(self, families: Iterable[Family]) -> dict[Key, Entry]:
        """Return the entries of the sets and their members. A set of another type or family has the entry
        False and no members.

        Raises KernelError.
        """
        served = tuple(families)
        self._known = {}
        found: dict[Key, Entry] = {}
        for name, listed in ipset.sets().items():
            base, family = NAMES.get(name, ("", None))
            if family in served and family is not None:
                self._known[name] = listed.set
                matches = _accept_same_members(listed.set, ip_set(base, family))
                found[Set(family, name)] = listed.set.type if matches else False
                found.update(dict.fromkeys(self._members(family, name) if matches else (), True))
        return found

    def create(self, keys: Iterable[Set]) -> Rejections:
        """Create the sets that do not exist. A set of another type is rejected, since rules would still refer
        to the old one.
        """
        rejected: Rejections = {}
        for key in keys:
            desired = ip_set(*NAMES[key.name])
            existing = self._known.get(key.name)
            if existing is None:
                try:
                    ipset.create(desired)
                except AlreadyExists as failure:
                    listed = ipset.sets().get(key.name)
                    if listed is None:  # another program has destroyed it since
                        rejected[key] = failure
                        continue
                    existing = listed.set
                except KernelError as failure:
                    rejected[key] = failure
                    continue
                self._known[key.name] = existing or desired
            if existing and not _accept_same_members(existing, desired):
                hint = f"remove the rules that iptables-save shows with it, then: ipset destroy {key.name}"
                actual, wanted = map(_described, (existing, desired))
                reason = f"cannot create ipset {key.name}: it exists as {actual}, not {wanted}"
                rejected[key] = Rejected(reason, hint)
        return rejected

    def change(self, puts: Iterable[Member], drops: Iterable[Member]) -> Rejections:
        """Add and remove members of several sets at once."""
        by_set: dict[tuple[Family, str], tuple[list[str], list[str]]] = {}
        for key in puts:
            by_set.setdefault((key.family, key.set), ([], []))[0].append(key.text)
        for key in drops:
            if key.set in self._known:
                by_set.setdefault((key.family, key.set), ([], []))[1].append(key.text)
        families = {name: family for family, name in by_set}
        failed = ipset.change(
            Change(ip_set(*NAMES[name]), add, drop) for (_, name), (add, drop) in by_set.items()
        )
        return {Member(families[name], name, text): error for (name, text), error in failed.items()}

    def destroy(self, keys: Iterable[Set]) -> Rejections:
        rejected: Rejections = {}
        for key in keys:
            try:
                ipset.destroy(key.name)
            except NotFound:
                pass
            except KernelError as failure:
                rejected[key] = failure
                continue
            self._known.pop(key.name, None)
        return rejected

    def generation(self) -> Mapping[str, int]:
        """Return the number of members of each set."""
        return {name: listed.elements for name, listed in ipset.sets().items() if name in NAMES}

    @staticmethod
    def _members(family: Family, name: str) -> Iterator[Member]:
        try:
            texts = ipset.members(name)
        except (NotFound, Unsupported):
            return  # it was removed or recreated since: then the entry of the set differs
        for text in texts:
            yield Member(family, name, text)


def _accept_same_members(one: IpSet, other: IpSet) -> bool:
    """Return whether both sets accept the same members."""
    return (one.type, one.family) == (other.type, other.family)


def _described(one: IpSet) -> str:
    return f"{one.type} of {one.family.value}" if one.family else one.type
