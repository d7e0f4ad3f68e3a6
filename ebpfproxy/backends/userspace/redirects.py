"""Tables of nftables that redirect the packets of frontends to the ports at which relays listen.

So other programs of the node can listen at the ports of Services at all addresses. The packets are rewritten
without NAT and connection tracking (decision 0068): the destination port at the end of the hook input, after
the rules of firewalls, and the source port of replies at the beginning of the hook output, before conntrack.
"""

import contextlib
import enum
import errno
from collections.abc import Collection, Hashable, Iterator, Mapping

from ebpfproxy.backends.userspace.entries import PORT_BIT, Entry, Key, Listen, Listening, other_port
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.nft import messages, nft, types
from ebpfproxy.linux.nft.messages import Hook, Operation, Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.notifications import TableWatch
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.rule_expressions import SetNames
from ebpfproxy.linux.nft.sets import Declaration, SetElement
from ebpfproxy.model.address import V4_PREFIX, Address, Family, Protocol, family, is_unspecified, unspecified
from ebpfproxy.plan.service_plan import Frontend

TABLE = "ebpfproxy"
"""The name of the tables, of families ip and ip6."""

PROTOCOLS = frozenset((Protocol.TCP, Protocol.UDP))
"""Those that relays have."""

MODULES = ("nf_tables", "nft_reject_ipv4", "nft_reject_ipv6")
"""The modules that the kernel needs for the tables."""

_FAMILIES = {Family.IPV4: "ip", Family.IPV6: "ip6"}
_OTHER = f"^ {PORT_BIT:#x}"
_ICMP_CHECKSUM = 2  # its offset
_ICMP_ERRORS = {
    "ip": ("meta l4proto 1 icmp type 3", "@th,136,8", "@th,160,32", "@th,224,16"),
    "ip6": ("meta l4proto 58 icmpv6 type < 128", "@th,112,8", "@th,128,128", "@th,384,16"),
}
"""What matches ICMP errors, and the bits of protocol, source address and source port of the packet that they
quote. IPv4 options are not supported."""
_TEMPORARY = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR})
_AT_ONCE = 500  # elements in a message, whose length is limited
_INPUT, _OUTPUT = "input", "output"
_HOOKS = {_INPUT: Hook("filter", "input", 200), _OUTPUT: Hook("filter", "output", -300)}


class State(enum.Enum):
    """What happens to the packets of a frontend. The value is the name of its set.

    - RELAYED: they are redirected to the other port.
    - REJECTED: no host process gets them.
    - NODE_PORT: they pass, although the address may be that of a rejected frontend.
    """

    RELAYED = "relayed"
    REJECTED = "rejected"
    NODE_PORT = "node-ports"


def can_redirect(frontend: Frontend) -> bool:
    """Return whether a frontend can be in state RELAYED or REJECTED."""
    is_one = not is_unspecified(frontend.address) and frontend.protocol in PROTOCOLS
    return is_one and other_port(frontend.port) != frontend.port


def probe() -> KernelError | None:
    """Return why the kernel cannot redirect packets of a family, None if it can. Nothing is written.

    Raises KernelError if that is unknown, for example without memory.
    """
    redirects = Redirects()
    reason = redirects.open()
    redirects.close()
    return reason


def _supported(session: Session) -> tuple[frozenset[Family], KernelError | None]:
    """Return the families that the kernel can redirect, and why it lacks another one.

    It tries all rules in a transaction that is aborted. The error is that of the family that comes first.
    Raises KernelError.
    """
    found, reason = set(), None
    for each in Family:
        table = Table(_FAMILIES[each], f"{TABLE}-probe")
        rejections = session.attempt(list(_creation(table, dormant=True)))
        if not rejections:
            found.add(each)
            continue
        number = rejections[0].errno
        failure = nft.failure(f"nftables for {each.value}", number, rejections[0].reason)
        if number in _TEMPORARY:
            raise failure
        reason = reason or failure
    return frozenset(found), reason


class Redirects:
    """The tables, in the network namespace in which the calling thread is at `open`."""

    def __init__(self) -> None:
        self.families: frozenset[Family] = frozenset()
        """Those that are redirected, after `open`."""
        self._opened: contextlib.ExitStack | None = None
        self._states: dict[Frontend, State] = {}
        self._intact: set[Family] = set()  # families whose table has the rules
        self._was_read = False
        self._count = 0

    def open(self) -> KernelError | None:
        """Return why a family is not redirected, None if both are. Nothing is written.

        Raises KernelError if that is unknown, for example without memory.
        """
        with contextlib.ExitStack() as opened:
            try:
                self._session = opened.enter_context(Session())
                families, reason = _supported(self._session)
                if families:
                    self._watch = TableWatch(TABLE)
                    opened.callback(self._watch.close)
                    self.families, self._opened = families, opened.pop_all()
            except KernelError as failure:
                if not isinstance(failure, Unsupported) and not nft.has_none(failure):
                    raise
                reason = failure
        return reason

    def read(self) -> Mapping[Frontend, State]:
        """Return the states. Those of a table that another program changed count as missing.

        Raises KernelError.
        """
        if self._opened:
            self._watch.settle()
            self._intact = set()
            self._states = {}
            for each in self.families:
                found = _read(self._session, each)
                if found is not None:
                    self._intact.add(each)
                    self._states |= found
            self._was_read = True
        return self._states

    def change(self, wanted: Mapping[Frontend, State | None]) -> None:
        """Set the states of these frontends; None removes one. Raises KernelError."""
        if not self._opened or not wanted:
            return
        if not self._was_read:
            self.read()
        with self._watch.own_change(self._session):
            for each in self.families:
                self._change(
                    each, {key: state for key, state in wanted.items() if family(key.address) is each}
                )

    def _change(self, of: Family, wanted: Mapping[Frontend, State | None]) -> None:
        table = Table(_FAMILIES[of], TABLE)
        operations: list[Operation] = []
        if of not in self._intact:
            if not any(wanted.values()):
                return
            operations += [messages.add_table(table), messages.delete_table(table), *_creation(table)]
            self._states = {
                key: state for key, state in self._states.items() if family(key.address) is not of
            }
        removed: dict[State, list[SetElement]] = {}
        added: dict[State, list[SetElement]] = {}
        for frontend, state in wanted.items():
            former = self._states.get(frontend)
            if former is not state:
                for into, which in ((removed, former), (added, state)):
                    if which:
                        into.setdefault(which, []).append(_element(frontend))
        for former, elements in removed.items():
            for at in range(0, len(elements), _AT_ONCE):
                operations.append(messages.delete_elements(table, former.value, elements[at : at + _AT_ONCE]))
        for state, elements in added.items():
            operations += messages.add_elements(table, state.value, elements)
        for rejection in self._session.commit(operations):
            self._was_read = False
            raise nft.failure(f"cannot change the nftables table {table}", rejection.errno, rejection.reason)
        self._intact.add(of)
        for frontend, state in wanted.items():
            if state:
                self._states[frontend] = state
            else:
                self._states.pop(frontend, None)

    def state(self, frontend: Frontend) -> State | None:
        """Return the state after the last change."""
        return self._states.get(frontend)

    def generation(self) -> Hashable:
        """Return a value that differs at each call after a change by another program, until `read`.

        Raises KernelError.
        """
        if self._opened:
            self._count += self._watch.is_disturbed()
        return self._count

    def close(self) -> None:
        """Reject what was relayed: nothing listens any more. Do nothing if not open."""
        if self._opened:
            relayed = {key: State.REJECTED for key, each in self._states.items() if each is State.RELAYED}
            with self._opened, contextlib.suppress(KernelError):
                self.change(relayed)
            self._opened = None


def in_force(
    held: dict[Key, Entry],
    states: Mapping[Frontend, State],
    families: Collection[Family],
    rejected: Collection[Key] = (),
) -> dict[Key, Entry]:
    """Return the entries of the relays that the states do not contradict, and those of the states.

    `families`: those that are redirected. `rejected`: keys that the last change could not put in force.
    """
    entries = {
        key: entry
        for key, entry in held.items()
        if not isinstance(key, Listen)
        or key.family not in families
        or states.get(key.frontend) is state_of(key, entry)
    }
    for frontend, state in states.items():
        listen = Listen(family(frontend.address), frontend)
        if listen not in entries and listen not in rejected:
            entries[listen] = state is State.REJECTED
    return entries


def state_of(key: Listen, entry: Entry) -> State | None:
    """Return the state of a frontend with a listener. None: its packets need no rule."""
    if is_unspecified(key.frontend.address):
        return State.NODE_PORT if key.frontend.protocol in PROTOCOLS else None
    is_redirected = isinstance(entry, Listening) and entry.port != key.frontend.port
    return State.RELAYED if is_redirected else None


def read_all() -> Mapping[Frontend, State] | None:
    """Return the states in the calling thread's network namespace, None if this process may not read them.

    Raises KernelError.
    """
    try:
        with Session() as session:
            return {key: state for each in Family for key, state in (_read(session, each) or {}).items()}
    except Unsupported:
        return None


def remove(dry_run: bool = False) -> list[str]:
    """Remove the tables; return one line for each. Raises KernelError."""
    try:
        with Session() as session:
            found = [each for each in session.tables() if each.name == TABLE]
            for table in () if dry_run else found:
                for each in session.commit([messages.delete_table(table)]):
                    raise nft.failure(f"cannot remove the nftables table {table}", each.errno, each.reason)
            return [f"nftables table {table}: redirects to relays" for table in found]
    except KernelError as failure:
        if nft.has_none(failure):
            return []
        raise


def _creation(table: Table, dormant: bool = False) -> Iterator[Operation]:
    names = SetNames()
    yield messages.add_table(table, dormant)
    for name, declaration in _sets(table.family).items():
        yield messages.add_set(table, name, declaration, names.number())
    for chain, hook in _HOOKS.items():
        yield messages.add_chain(table, chain, hook)
    for chain, rule in _rules(table.family):
        yield from messages.add_rule(table, chain, rule, names)


def _sets(ip: str) -> dict[str, Declaration]:
    address = types.IPV4 if ip == "ip" else types.IPV6
    with_address = Declaration((types.PROTOCOL, address, types.PORT))
    return {
        State.RELAYED.value: with_address,
        State.REJECTED.value: with_address,
        State.NODE_PORT.value: Declaration((types.PROTOCOL, types.PORT)),
    }


def _rules(ip: str) -> Iterator[tuple[str, Rule]]:
    """Yield the rules with their chains. A packet that a client sends to the other port itself is dropped:
    its reply would come from the frontend.
    """
    relayed, rejected, node_ports = (f"@{each.value}" for each in State)
    client = f"meta l4proto . {ip} daddr . th dport"
    reply = f"meta l4proto . {ip} saddr . th sport"
    if ip == "ip":
        without_checksum = f"meta l4proto udp udp checksum 0 {client} {relayed}"
        yield _INPUT, Rule(f"{without_checksum} th dport set th dport {_OTHER} accept")
    for each in ("tcp", "udp"):
        to_client = f"{each} dport set {each} dport {_OTHER}"
        yield _INPUT, Rule(f"meta l4proto {each} {client} {relayed} {to_client} accept")
        to_reply = f"{each} sport set {each} sport {_OTHER}"
        yield _OUTPUT, Rule(f"meta l4proto {each} {reply} {_OTHER} {relayed} {to_reply}")
    yield _INPUT, Rule(f"{client} {_OTHER} {relayed} drop")
    yield _INPUT, Rule(f"meta l4proto . th dport {node_ports} accept")
    yield _INPUT, Rule(f"meta l4proto tcp {client} {rejected} reject with tcp reset")
    yield _INPUT, Rule(f"{client} {rejected} reject")
    error, protocol, address, port = _ICMP_ERRORS[ip]
    quoted = f"{protocol} . {address} . {port} {relayed}"
    yield _INPUT, Rule(f"{error} {quoted} {port} set {port} {_OTHER} checksum {_ICMP_CHECKSUM}")


def _read(session: Session, of: Family) -> dict[Frontend, State] | None:
    """Return the states of a table; None if there is none, or if its rules or sets are not as they were
    created.
    """
    ip = _FAMILIES[of]
    table = Table(ip, TABLE)
    sets = {each.name: each.declaration for each in session.sets(table)}
    chains = {each.name: (each.hook, each.accepts) for each in session.chains(table)}
    rules = [(each.chain, each.rule) for each in session.rules(table)]
    expected = [pair for chain in _HOOKS for pair in _rules(ip) if pair[0] == chain]
    if sets != _sets(ip) or chains != {name: (hook, True) for name, hook in _HOOKS.items()}:
        return None
    if sorted(rules, key=lambda pair: list(_HOOKS).index(pair[0])) != expected:
        return None
    states: dict[Frontend, State] = {}
    for state in State:
        for each in session.elements(table, state.value):
            frontend = _frontend(each.key, of)
            if frontend is None or frontend in states:
                return None
            states[frontend] = state
    return states


def _element(frontend: Frontend) -> SetElement:
    number, port = frontend.protocol.to_bytes(1).ljust(4, b"\0"), frontend.port.to_bytes(2).ljust(4, b"\0")
    if is_unspecified(frontend.address):
        return SetElement(number + port)
    return SetElement(number + frontend.address.removeprefix(V4_PREFIX) + port)


def _frontend(key: bytes, of: Family) -> Frontend | None:
    """Return the frontend of an element; None if another program has added it."""
    number, raw, port = key[0], key[4:-4], int.from_bytes(key[-4:-2])
    address = Address(V4_PREFIX + raw if of is Family.IPV4 else raw) if raw else unspecified(of)
    return Frontend(address, port, Protocol(number)) if number in set(map(int, PROTOCOLS)) else None
