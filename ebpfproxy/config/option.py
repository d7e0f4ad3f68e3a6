"""The declaration of one option: the metadata of a field of `Config`."""

import dataclasses
import enum
from typing import Any

from ebpfproxy.config.flag_types import Kind


class Group(enum.Enum):
    """The headings of the help, in order."""

    FILE = "The configuration file"
    CLUSTER = "The cluster and this node"
    TRAFFIC = "Traffic"
    NETFILTER = "Modes nftables, iptables and ipvs"
    IPVS = "Mode ipvs"
    USERSPACE = "Mode userspace"
    EBPF = "Mode ebpf (ebpfproxy's own)"
    EDGE = "Role edge (ebpfproxy only)"
    HTTP = "HTTP servers"
    PROCESS = "The process"


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option.

    - `flags`: as typed, for example ``--sync-period``, or ``-v`` and ``--v``;
    - `default`: as the text of the flag. None if no text has the effect of leaving the flag out; then `help`
      describes the default;
    - `fields`: its fields in a KubeProxyConfiguration, empty if there is only the flag. Several fields are in
      the sections of different modes: iptables, nftables, ipvs;
    - `zero_is_unset`: a zero in the file means not given, because kube-proxy's type is not a pointer;
    - `over_file`: the flag overrides the field. Other flags with a field are ignored if there is a file.
    """

    name: str
    flags: tuple[str, ...]
    kind: Kind
    default: str | None
    group: Group
    help: str
    fields: tuple[str, ...] = ()
    zero_is_unset: bool = False
    over_file: bool = False

    @property
    def flag(self) -> str:
        """The long flag, which is the name of the option in messages."""
        return self.flags[-1]

    def parse(self, text: Any) -> Any:
        """Return the value of a text; for a kind that is `many`, of a sequence of texts.

        None and an empty sequence mean the default. Raises ValueError.
        """
        if text is not None and text != ():
            return self.kind.parse(text)
        if self.default is None:
            return None
        return self.kind.parse([self.default] if self.kind.many else self.default)


def option(
    flags: str,
    kind: Kind,
    default: str | None,
    group: Group,
    help: str,
    *,
    fields: str = "",
    zero_is_unset: bool = False,
    over_file: bool = False,
) -> Any:
    """Return a field of `Config`. `flags` (the long form last) and `fields` are separated by spaces."""
    declared = Option(
        "",
        tuple(flags.split()),
        kind,
        default,
        group,
        help,
        tuple(fields.split()),
        zero_is_unset,
        over_file,
    )
    return dataclasses.field(default=declared.parse(None), metadata={"option": declared})


def declared_by(cls: type) -> dict[str, Option]:
    """Return the options of a dataclass by field name, sorted by group, then in order of declaration."""
    declared = [
        dataclasses.replace(field.metadata["option"], name=field.name) for field in dataclasses.fields(cls)
    ]
    order = list(Group)
    return {each.name: each for each in sorted(declared, key=lambda each: order.index(each.group))}
