"""The declaration of one option: what stands beside a field of `Config`."""

import dataclasses
import enum
from typing import Any

from ebpfproxy.config.flag_types import Kind


class Group(enum.Enum):
    """The headings of the help, in their order."""

    FILE = "The configuration file"
    CLUSTER = "The cluster and this node"
    TRAFFIC = "Traffic"
    NETFILTER = "Modes nftables, iptables and ipvs"
    IPVS = "Mode ipvs"
    EBPF = "Mode ebpf (ebpfproxy's own)"
    HTTP = "HTTP servers"
    PROCESS = "The process"


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """`flags` as typed, ``--sync-period`` or ``-v`` and ``--v``; `default` in the flag's own text.

    A `default` of None means that not giving the flag differs from any text; `help` explains it then.

    `fields`: where the option stands in a KubeProxyConfiguration; none where only the flag has it. Of
    several, each is in the section of another mode: iptables, nftables, ipvs. `zero_is_unset`: a zero there
    is the same as no field, since kube-proxy's type is no pointer. `over_file`: the flag wins over the
    field; otherwise the flag is not looked at where there is a file.
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
        """The long form, by which messages name the option."""
        return self.flags[-1]

    def parse(self, text: Any) -> Any:
        """The value of `text`: a str, or of a kind that is many a sequence of them.

        None, or an empty sequence, takes the default.

        Raises ValueError.
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
    """A field of `Config`; `flags` are separated by spaces, the long form last, and so are `fields`."""
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
    """The options of a dataclass by the name of their field: by group, then in the order of writing."""
    declared = [
        dataclasses.replace(field.metadata["option"], name=field.name) for field in dataclasses.fields(cls)
    ]
    order = list(Group)
    return {each.name: each for each in sorted(declared, key=lambda each: order.index(each.group))}
