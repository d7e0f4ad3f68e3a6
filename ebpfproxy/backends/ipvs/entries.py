"""What the IPVS backend holds, by key. Pure.

SyncHooks chains and rules, which are those of `xtables.entries`, there are four kinds of entries:

- `Server`: a virtual server with its real servers, by the frontend that is dialled. Both come from one plan,
  so they are one entry. A real server of weight 0 is none: it is on its way out, by itself.
- `Local`: an address of Services that the node takes for its own. It is on kube-ipvs0, and in the set
  KUBE-IPVS-IPS, unless another device has it anyway.
- `Set`: an ipset of the node's, empty or not. The node renders all of them, so they are made before any rule
  that refers to them, and before any member.
- `Member`: one member of an ipset, as text.

**NodePorts** answer on many addresses, and neither the plan of a Service nor the node's knows both. So the
first renders the `Server` with the unspecified address, and likewise a `Member` that begins with it
(`sets.ANYWHERE`); the latter renders the addresses, as members of KUBE-NODE-PORT-IP. What is in the kernel is
their product, made and taken apart again in `product`: so each entry depends on one plan alone, and a new
address of the node, or a new NodePort, is one entry.

No two keys of different kinds are equal, though they are tuples: an address is bytes, the name of a set no
table's, and what stands behind the family of a `Server` is itself a tuple.
"""

from typing import NamedTuple

from ebpfproxy.backends.xtables.entries import Chain, Rule, RulePosition, SharedChain
from ebpfproxy.linux.ipvs.messages import Flag, RealServer
from ebpfproxy.model.address import Address, Family, format_address
from ebpfproxy.plan.service_plan import Frontend


class Server(NamedTuple):
    family: Family
    frontend: Frontend

    def __str__(self) -> str:
        return f"virtual server {self.frontend}"


class ServerEntry(NamedTuple):
    """`persistence_s`: of a client, 0 for none; `prefix`: of which clients count as one, None for the usual.
    `reals` sorted."""

    scheduler: str
    flags: Flag
    persistence_s: int
    reals: tuple[RealServer, ...]
    prefix: int | None = None


class Local(NamedTuple):
    family: Family
    address: Address

    def __str__(self) -> str:
        return f"address {format_address(self.address)}"


class Set(NamedTuple):
    family: Family
    name: str

    def __str__(self) -> str:
        return f"ipset {self.name}"


class Member(NamedTuple):
    """`text` as ``ipset list`` prints it."""

    family: Family
    set: str
    text: str

    def __str__(self) -> str:
        return f"{self.text} in ipset {self.set}"


Key = Server | Local | Set | Member | Chain | SharedChain | Rule
Entry = ServerEntry | str | bool | tuple[str, ...] | RulePosition
"""For a Set its type, for a Local and a Member True; False for what is there but not as it should be."""
