"""The ipsets in the kernel, of both families."""

from collections.abc import Iterable, Iterator, Mapping

from ebpfproxy.backends.ipvs.entries import Entry, Key, Member, Set
from ebpfproxy.backends.ipvs.sets import NAMES, SETS, ip_set
from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.ipset import ipset
from ebpfproxy.linux.ipset.ipset import Change
from ebpfproxy.linux.ipset.messages import IpSet
from ebpfproxy.model.address import Family

Rejections = dict[Key, KernelError]


def make_all(of: Family) -> None:
    """Where there is none yet. Raises KernelError."""
    for base in SETS:
        ipset.create(ip_set(base, of))


class IpSets:
    """In the calling thread's network namespace. Sets of other names are ignored."""

    def __init__(self) -> None:
        self._held: dict[str, IpSet] = {}

    def read(self, families: Iterable[Family]) -> dict[Key, Entry]:
        """Of a set that is there as another type, or for the other family, nothing but that. Raises
        KernelError."""
        served = tuple(families)
        self._held = {}
        found: dict[Key, Entry] = {}
        for name, listed in ipset.sets().items():
            base, of = NAMES.get(name, ("", None))
            if of in served and of is not None:
                self._held[name] = listed.set
                alike = _is_alike(listed.set, ip_set(base, of))
                found[Set(of, name)] = listed.set.type if alike else False
                found.update(dict.fromkeys(self._members(of, name) if alike else (), True))
        return found

    def create(self, keys: Iterable[Set]) -> Rejections:
        """Those that there are not. One of another type is rejected: no rule would follow a change."""
        rejected: Rejections = {}
        for key in keys:
            made = ip_set(*NAMES[key.name])
            held = self._held.get(key.name)
            if held is None:
                try:
                    ipset.create(made)
                except AlreadyExists as failure:
                    listed = ipset.sets().get(key.name)
                    if listed is None:  # its owner destroyed it just now
                        rejected[key] = failure
                        continue
                    held = listed.set
                except KernelError as failure:
                    rejected[key] = failure
                    continue
                self._held[key.name] = held or made
            if held and not _is_alike(held, made):
                hint = f"see who refers to it by iptables-save, remove that, then: ipset destroy {key.name}"
                there, wanted = map(_described, (held, made))
                rejected[key] = Rejected(f"ipset {key.name} is there as {there}, not {wanted}", hint)
        return rejected

    def change(self, puts: Iterable[Member], drops: Iterable[Member]) -> Rejections:
        """Members, of all sets at a time."""
        by_set: dict[tuple[Family, str], tuple[list[str], list[str]]] = {}
        for key in puts:
            by_set.setdefault((key.family, key.set), ([], []))[0].append(key.text)
        for key in drops:
            if key.set in self._held:
                by_set.setdefault((key.family, key.set), ([], []))[1].append(key.text)
        families = {name: of for of, name in by_set}
        failed = ipset.change(
            Change(ip_set(*NAMES[name]), add, drop) for (_, name), (add, drop) in by_set.items()
        )
        return {Member(families[name], name, text): why for (name, text), why in failed.items()}

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
            self._held.pop(key.name, None)
        return rejected

    def generation(self) -> Mapping[str, int]:
        """How many members each set has."""
        return {name: listed.elements for name, listed in ipset.sets().items() if name in NAMES}

    @staticmethod
    def _members(of: Family, name: str) -> Iterator[Member]:
        try:
            texts = ipset.members(name)
        except (NotFound, Unsupported):
            return  # it is gone, or was made again meanwhile: then its own entry differs
        for text in texts:
            yield Member(of, name, text)


def _is_alike(one: IpSet, other: IpSet) -> bool:
    """Whether the same members can be said of both."""
    return (one.type, one.family) == (other.type, other.family)


def _described(one: IpSet) -> str:
    return f"{one.type} of {one.family.value}" if one.family else one.type
