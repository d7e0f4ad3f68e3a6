"""ipset: sets of addresses and ports that rules of iptables refer to, by netlink, without ipset(8).

A member is text as ipset(8) shows it: "10.0.0.1", "10.0.0.1,tcp:80", "10.0.0.1,tcp:80,10.0.0.0/8" (a single
address without its length), "fd00::1,udp:53,fd00::2", "30080". Protocols are tcp, udp, sctp, or a number.

Everything here acts in the network namespace that the calling thread is in. Sources as of `ipset_messages`.
"""

import errno
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, TableFull, Unsupported
from ebpfproxy.linux.ipset import messages
from ebpfproxy.linux.ipset.messages import SUBSYSTEM, Command, IpSet, Listed
from ebpfproxy.linux.netlink import netlink

NETLINK_NETFILTER = 12

TEMPORARY = "ebpfproxy-new"
"""The set that `replace` fills."""

Rejections = dict[tuple[str, str], KernelError]
"""Why the kernel rejected a member of a set, by the names of both. With "" for the member: the set itself, of
which nothing was changed then."""


class Change(NamedTuple):
    """Members that come and go, of a set that there is."""

    set: IpSet
    add: Collection[str] = ()
    drop: Collection[str] = ()


class _Step(NamedTuple):
    """One message. `member` is "" for one about the set as a whole; `harmless`: errors that do not matter."""

    request: netlink.Request
    set: IpSet
    member: str
    harmless: Collection[int] = ()


def available() -> None:
    """Load ipset where it is a module. Raises Unsupported where the kernel has none, Rejected."""
    try:
        netlink.get(NETLINK_NETFILTER, SUBSYSTEM | Command.PROTOCOL, messages.about(""))
    except OSError as error:
        raise _failure("ipset cannot be used", error.errno or 0) from error


def sets() -> dict[str, Listed]:
    """All that there are, by name, without their members. Raises Unsupported, Rejected."""
    payloads = _dump("", messages.headers_only())
    return {listed.set.name: listed for listed in map(messages.read_set, payloads)}


def members(name: str) -> frozenset[str]:
    """Raises NotFound; Unsupported for a type that is not one of `ipset_messages.TYPES`; Rejected."""
    payloads = _dump(name)
    type_ = next(filter(None, map(messages.type_of, payloads)), "")
    if type_ not in messages.TYPES:
        raise Unsupported(f"members of ipset {name} cannot be read: it is a {type_}")
    return frozenset(
        member
        for payload in payloads
        for member in messages.read_members(messages.raw_members(payload), type_)
    )


def fingerprint(names: Iterable[str]) -> bytes:
    """Changes with every change of the type or the members of one of these sets.

    It takes a seventh of what `members` does: 13 ms for 30 000. A set may be missing. Raises
    Unsupported, Rejected.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        try:
            payloads = _dump(name)
        except NotFound:
            payloads = []
        for payload in payloads:
            digest.update(messages.type_of(payload).encode())
            digest.update(messages.raw_members(payload))
        digest.update(b"\0")
    return digest.digest()


def create(made: IpSet) -> None:
    """Empty. Raises AlreadyExists, Unsupported where the kernel has no such type, TableFull, Rejected."""
    _do(
        Command.CREATE,
        made.name,
        messages.describe_set(made),
        netlink.NLM_F_CREATE | netlink.NLM_F_EXCL,
    )


def destroy(name: str) -> None:
    """Raises NotFound; Rejected while a rule refers to it, or for no name."""
    if not name:  # the kernel would destroy all
        raise Rejected("an ipset without a name cannot be destroyed")
    _do(Command.DESTROY, name, messages.about(name), netlink.NLM_F_EXCL)  # else it need not be there


def change(changes: Iterable[Change]) -> Rejections:
    """Add and drop members, of any number of sets; what was rejected. All the rest is in force.

    To add what is there, or to drop what is not, is fine. Raises Unsupported, Rejected.
    """
    rejections: Rejections = {}
    steps = [
        step
        for of, add, drop in changes
        for command, texts in ((Command.DELETE, drop), (Command.ADD, add))
        for step in _member_steps(command, of, of.name, texts, rejections)
    ]
    return _carry_out(steps, rejections)


def replace(contents: Mapping[IpSet, Collection[str]]) -> Rejections:
    """Give each of these sets these members and no others, in one step as packets see it; what was rejected.

    A set that there is not is made. One that there is keeps its references, and gets the new maximum; it has
    to be of the same type and family, else nothing becomes of it. Raises Unsupported, Rejected.
    """
    rejections: Rejections = {}
    steps = [step for made, texts in contents.items() for step in _replacing(made, texts, rejections)]
    return _carry_out(steps, rejections)


def _member_steps(
    command: Command, of: IpSet, name: str, texts: Collection[str], rejections: Rejections
) -> Iterator[_Step]:
    """Those of members that cannot even be said are among the rejections at once."""
    about = messages.about(name)
    for text in texts:
        try:
            body = about + messages.describe_member(of, text)
        except ValueError as error:
            rejections[of.name, text] = Rejected(f"member {text} of ipset {of.name}: {error}")
            continue
        yield _Step(netlink.Request(SUBSYSTEM | command, 0, body), of, text)


def _replacing(made: IpSet, texts: Collection[str], rejections: Rejections) -> Iterator[_Step]:
    def step(command: Command, body: bytes, flags: int, *harmless: int) -> _Step:
        return _Step(netlink.Request(SUBSYSTEM | command, flags, body), made, "", harmless)

    new = made._replace(name=TEMPORARY)
    created = netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
    yield step(Command.DESTROY, messages.about(TEMPORARY), 0, errno.ENOENT)  # of a run that was killed
    yield step(Command.CREATE, messages.describe_set(new), created)
    yield from _member_steps(Command.ADD, made, TEMPORARY, texts, rejections)
    yield step(Command.CREATE, messages.describe_set(made), created, errno.EEXIST)
    yield step(Command.SWAP, messages.swap(TEMPORARY, made.name), 0)
    yield step(Command.DESTROY, messages.about(TEMPORARY), 0)


def _carry_out(steps: Collection[_Step], rejections: Rejections) -> Rejections:
    """Of what was rejected of a set as a whole only the first thing is reported: the rest follows from it."""
    steps = list(steps)
    try:
        rejected = netlink.changes(NETLINK_NETFILTER, [step.request for step in steps])
    except OSError as error:
        raise _failure("ipsets cannot be changed", error.errno or 0) from error
    for position, why in sorted(rejected.items()):
        _, of, member, harmless = steps[position]
        if why.errno not in harmless and (of.name, "") not in rejections:
            what = f"member {member} of ipset {of.name}" if member else f"ipset {of.name}"
            rejections[of.name, member] = _failure(what, why.errno)
    return rejections


def _do(command: Command, name: str, body: bytes, flags: int = 0) -> None:
    try:
        netlink.change(NETLINK_NETFILTER, SUBSYSTEM | command, body, flags)
    except OSError as error:
        raise _failure(f"ipset {name}", error.errno or 0) from error


def _dump(name: str, conditions: bytes = b"") -> list[bytes]:
    what = f"ipset {name}" if name else "ipsets cannot be read"
    try:
        body = messages.about(name) + conditions
        return netlink.dump(NETLINK_NETFILTER, SUBSYSTEM | Command.LIST, body)
    except OSError as error:
        raise _failure(what, error.errno or 0) from error


_OWN_ERRORS: dict[int, tuple[type[KernelError], str, str]] = {
    4098: (
        Unsupported,
        "this kernel has no such type, or no such revision of it",
        "modprobe ip_set_hash_ipport",
    ),
    4099: (TableFull, "there are as many sets as the kernel takes", "raise max_sets of the module ip_set"),
    4100: (Rejected, "a rule, or a set of sets, refers to it", "remove that first"),
    4102: (AlreadyExists, "there is one of another type or family already", "destroy it"),
    4103: (AlreadyExists, "there is one already", ""),
    4104: (Rejected, "a network of 0 bits cannot be a member", "say two of 1 bit"),
    4108: (Rejected, "a rule refers to it", "remove that first"),
    4109: (Rejected, "not an IPv4 address", ""),
    4110: (Rejected, "not an IPv6 address", ""),
    4352: (TableFull, "it has as many members as it may have", "make it with more"),
    4354: (Rejected, "the kernel does not know that protocol", ""),
}
"""enum ipset_errno, and what the types add to it."""


def _failure(what: str, number: int) -> KernelError:
    """nfnetlink answers EINVAL for a part that it has not got (nfnetlink_rcv_msg())."""
    if number in _OWN_ERRORS:
        kind, reason, hint = _OWN_ERRORS[number]
        return kind(f"{what}: {reason}", hint)
    message = f"{what}: {os.strerror(number)}"
    if number == errno.ENOENT:
        return NotFound(f"{what}: there is none")
    if number == errno.EEXIST:
        return AlreadyExists(f"{what}: there is one already")
    if number in (errno.EPERM, errno.EACCES):
        return Unsupported(message, "run as root, or with CAP_NET_ADMIN")
    if number in (errno.EINVAL, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP):
        return Unsupported(message, "modprobe ip_set, or use a kernel with CONFIG_IP_SET")
    return Rejected(message)
