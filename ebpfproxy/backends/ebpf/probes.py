"""Probes the features of this machine that the eBPF backend requires or can use.

Each probe uses the feature. It leaves nothing and does not affect traffic: maps and programs are closed at
once, a file system is opened but not mounted, and a network namespace is removed again. Versions of Linux are
only for messages.
"""

import contextlib
import errno
import importlib.util
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from socket import AF_INET, AF_INET6, IPPROTO_IPV6, IPV6_V6ONLY, SOCK_DGRAM, socket
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi, attachments, features
from ebpfproxy.backends.ebpf.attachments import SIDES
from ebpfproxy.backends.ebpf.devices import xdp
from ebpfproxy.backends.ebpf.entries import INGRESS
from ebpfproxy.backends.ebpf.hooks import CONNECT4, SCHED_CLS, SOCKET_HOOKS, XDP, XDP_ATTACH_TYPE
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.backends.ebpf.programs import has_object_file
from ebpfproxy.backends.ebpf.sockets import netns_cookie
from ebpfproxy.backends.findings import Finding
from ebpfproxy.errors import KernelError, NotFound, Unsupported
from ebpfproxy.linux import capabilities, mounts
from ebpfproxy.linux.bpf import cgroup, compiler, ring_buffer, tc, tcx
from ebpfproxy.linux.bpf.bpf import Link, Map, Program
from ebpfproxy.linux.bpf.xdp import Mode
from ebpfproxy.linux.netlink import geneve, links
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.sockets import duplicates, sockets
from ebpfproxy.model.address import Address, Family, Protocol, unspecified

_HASH, _ARRAY, _LRU_HASH, _LPM_TRIE = 1, 2, 9, 11  # BPF_MAP_TYPE_*
_NO_PREALLOC, _MMAPABLE = 1, 1 << 10  # BPF_F_*
_LOOPBACK = 1  # its ifindex in every network namespace
_SKB_MODE = 1 << 1  # XDP_FLAGS_SKB_MODE
_INIT = 1  # the process ID of the first process in a PID namespace
TUNNELS = "direct server return"
_OTHER_PORT = "select another port with --ebpf-dsr-port, on all nodes"
_NO_FILE = 1 << 30  # a descriptor that is never open
_FORWARD = re.compile(r'#include "(/usr/include/[^"]+)"')

_COMPARE_POINTERS = bytes((0x1D, 0xA1, *bytes(6)))  # struct bpf_insn: if r1 == r10 goto +0

_NO_BCC = "no object file for these BPF programs, and no Python package bcc to compile them"
_NEWER = "use a newer kernel: Linux {} has it"

_MAPS = (  # type, size of the key, flags
    ("maps of the kind LRU hash", (_LRU_HASH, 4, 0), "4.10"),
    ("maps of the kind LPM trie", (_LPM_TRIE, 8, _NO_PREALLOC), "4.11"),
    ("maps that are written through memory", (_ARRAY, 4, _MMAPABLE), "5.5"),
)
_WITHOUT_HOOK = {
    "sock_release": "entries of closed sockets stay until others replace them",
    "getpeername4": "getpeername() shows the endpoint",
    "getpeername6": "getpeername() shows the endpoint",
}


class Helper(NamedTuple):
    name: str
    without: str
    since: str


_NO_COMPARISON = "ports to masquerade with are not compared with those of the node's own connections"
_NO_REDIRECT = "no --ebpf-redirect, and with --socket-lb=off host processes reach no Service"
HELPERS = {
    "HAVE_SK_LOOKUP_UDP": Helper("bpf_sk_lookup_udp", _NO_COMPARISON, "4.20"),
    "HAVE_FIB_LOOKUP": Helper("bpf_fib_lookup", _NO_REDIRECT, "4.18"),
    "HAVE_FIB_LOOKUP_SRC": Helper(
        "BPF_FIB_LOOKUP_SRC",
        "at devices with several addresses, routing rules do not affect the masquerade address",
        "6.7",
    ),
    "HAVE_SKC_LOOKUP_TCP": Helper("bpf_skc_lookup_tcp", _NO_COMPARISON, "5.2"),
    "HAVE_REDIRECT_NEIGH": Helper(
        "bpf_redirect_neigh",
        f"{_NO_REDIRECT}, and packets to on-link frontends wait until a machine answers for the address",
        "5.10",
    ),
    "HAVE_REDIRECT_PEER": Helper(
        "bpf_redirect_peer", "--ebpf-redirect sends packets to pods through their devices' queues", "5.10"
    ),
    "HAVE_KTIME_COARSE": Helper("bpf_ktime_get_coarse_ns", "a slower clock", "5.11"),
    "HAVE_NETNS_COOKIE": Helper(
        "bpf_get_netns_cookie in tc programs",
        "packets of the node are found by their source address",
        "6.15",
    ),
    "HAVE_SET_RETVAL": Helper(
        "bpf_set_retval", "a rejected connection fails with EPERM instead of ECONNREFUSED", "5.18"
    ),
    "HAVE_SKC_TO_MPTCP_SOCK": Helper(
        "bpf_skc_to_mptcp_sock", "getpeername() of an MPTCP socket shows the endpoint", "5.19"
    ),
}
"""The helper functions, by the name of the feature in features.py."""


def probe(
    bpffs_root: Path, cgroup_root: Path | None, devices: bool, xdp_mode: Mode | None = None
) -> tuple[Finding, ...]:
    """The findings, required features first. It takes about 10 ms.

    `cgroup_root`: None to find it. `devices`: whether network devices are managed. `xdp_mode`: that of the
    XDP program, None for none. If bpf(2) itself is rejected, features that use it cannot be tried, and are
    left out.
    """
    allowed = _bpf()
    files = _cgroup(cgroup_root, allowed.present), _bpffs(bpffs_root), *_compiled()
    if not allowed.present:
        return allowed, *files
    attaching = _attaching() if devices else ()
    needed = (allowed, *_maps(), *_hooks(), _netns_cookie(cgroup_root), *attaching[:1], *files)
    places: list[Finding] = []
    if devices:
        with contextlib.suppress(KernelError):  # it is not required
            places.extend(_places(bpffs_root))
            if xdp_mode:
                places += _xdp_link(), *_xdp_places(bpffs_root, xdp_mode)
    return (*needed, *_helpers(), _links(), *attaching[1:], _reconnecting(), _destroying(), *places)


def tunnels(port: int) -> Finding:
    """Whether this node can tunnel packets at this UDP port (direct server return). It is not required.

    The port is not tried if the agent's device has it.
    """
    without = "packets to endpoints on other nodes are translated"
    present = _tried(partial(_create_tunnel, port), TUNNELS, "", "", needed=False)
    if present.present and not geneve.find(port):
        present = _tried(
            partial(_bind, port), TUNNELS, f"UDP port {port} is in use", _OTHER_PORT, needed=False
        )
    if present.present:
        return present
    return present._replace(missing=f"{present.missing}: {without}", modules=("geneve",))


def _create_tunnel(port: int) -> None:
    with netns.throw_away():
        geneve.ensure(port)


def _bind(port: int) -> None:
    """Bind the port in both families for a moment, as the device does."""
    for family in (AF_INET, AF_INET6):
        try:
            with socket(family, SOCK_DGRAM) as unused:
                if family is AF_INET6:
                    unused.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 1)
                unused.bind(("", port))
        except OSError as failure:
            if failure.errno != errno.EAFNOSUPPORT:  # a kernel without IPv6
                raise


def _tried(
    attempt: Callable[[], object], feature: str, missing: str, remedy: str, needed: bool = True
) -> Finding:
    """The finding of an attempt. An empty `missing` or `remedy` is replaced by the error's message or
    hint."""
    try:
        attempt()
    except (KernelError, OSError) as failure:
        message, hint = (
            (failure.message, failure.hint) if isinstance(failure, KernelError) else (str(failure), "")
        )
        return Finding(feature, _number(failure), missing or message, remedy or hint, needed)
    return Finding(feature, needed=needed)


def _number(failure: BaseException | None) -> int:
    """The errno that caused an error, EINVAL if unknown."""
    while failure:
        if isinstance(failure, OSError) and failure.errno:
            return failure.errno
        if isinstance(failure, NotFound) and not failure.__cause__:
            return errno.ENOENT
        failure = failure.__cause__
    return errno.EINVAL


def _load(type_: int, attach_type: int, code: bytes) -> None:
    Program.load(type_, attach_type, code).close()


_load_connect = partial(_load, CONNECT4.program_type, CONNECT4.attach_type)


# bpf(2)


def _bpf() -> Finding:
    """Whether this process may create maps, and load programs for packets that compare pointers."""
    try:
        Map.create(_ARRAY, 4, 4, 1).close()
        _load(SCHED_CLS, 0, features.RETURN_0)
        _load(SCHED_CLS, 0, _COMPARE_POINTERS + features.RETURN_0)
    except KernelError as failure:
        number = _number(failure)
        explain = {
            errno.ENOSYS: _explain_unknown,
            errno.EPERM: _explain_rejected,
            errno.EACCES: _explain_rejected,
        }.get(number)
        missing, remedy = explain() if explain else (failure.message, failure.hint)
        return Finding("bpf(2)", number, missing, remedy)
    return Finding("bpf(2)")


def _explain_unknown() -> tuple[str, str]:
    """What is missing, and the remedy, if the kernel does not know bpf(2)."""
    if capabilities.is_filtered():
        return "a seccomp filter hides it, or this kernel has none", "run the container privileged"
    return "this kernel has none", "use a kernel with CONFIG_BPF_SYSCALL"


def _explain_rejected() -> tuple[str, str]:
    """What is missing, and the remedy, if bpf(2) is not permitted.

    Linux before 5.8 has only CAP_SYS_ADMIN. Later versions accept it instead of the others.
    """
    held = capabilities.capabilities()
    lacking = [
        name for name in (capabilities.BPF, capabilities.NET_ADMIN, capabilities.PERFMON) if name not in held
    ]
    if lacking and capabilities.SYS_ADMIN not in held:
        return f"without {' and '.join(lacking)} it is not permitted", "run as root, or privileged"
    if capabilities.is_filtered():
        return "a seccomp filter rejects it", "run the container privileged, or with seccomp unconfined"
    return (
        "it is not permitted in spite of the required capabilities",
        "run outside of user namespaces, and check whether a security module or lockdown forbids it",
    )


# The kernel's parts


def _maps() -> Iterator[Finding]:
    for feature, (type_, key_size, flags), since in _MAPS:
        attempt = partial(_make_map, type_, key_size, flags)
        yield _tried(attempt, feature, "this kernel cannot create them", _NEWER.format(since))
    yield _tried(_make_ring, "ring buffers", "this kernel has none", _NEWER.format("5.8"))
    yield _tried(_write_batch, "batches of map entries", "this kernel has none", _NEWER.format("5.6"))


def _make_map(type_: int, key_size: int, flags: int) -> None:
    Map.create(type_, key_size, 8, 1, flags).close()


def _make_ring() -> None:
    Map.create(ring_buffer.TYPE, 0, 0, abi.CONSTANTS["EVENTS_SIZE"]).close()


def _write_batch() -> None:
    with contextlib.closing(Map.create(_HASH, 4, 4, 1)) as map_:
        map_.update_all([(bytes(4), bytes(4))])


def _hooks() -> Iterator[Finding]:
    for hook in SOCKET_HOOKS:
        options = "CONFIG_CGROUP_BPF" + (" and CONFIG_IPV6" if hook.name.endswith("6") else "")
        yield _tried(
            partial(_load, hook.program_type, hook.attach_type, features.RETURN_1),
            f"cgroup hook {hook.name}",
            _WITHOUT_HOOK.get(hook.name, "this kernel does not have it"),
            f"{_NEWER.format(hook.since)}, with {options}",
            needed=not hook.optional,
        )


def _netns_cookie(root: Path | None) -> Finding:
    """The programs use the cookie to distinguish the node's sockets from those of pods."""
    name = "the network namespace's cookie"
    attempt = partial(_load_connect, features.GET_NETNS_COOKIE + features.RETURN_1)
    for_programs = _tried(attempt, name, "programs cannot read it", _NEWER.format("5.7"))
    if not for_programs.present:
        return for_programs
    return _tried(partial(netns_cookie.own, root), name, "", "")


def _clsact() -> Finding:
    name = "clsact with bpf filters"
    with contextlib.ExitStack() as stack:
        program = Program.load(SCHED_CLS, 0, features.RETURN_0)
        stack.callback(program.close)
        try:
            stack.enter_context(netns.throw_away())
        except KernelError as failure:  # the backend does not need new namespaces, only this probe does
            return Finding(
                name, _number(failure), f"it cannot be tested: {failure.message}", "", needed=False
            )
        return _tried(
            partial(tc.try_out, _LOOPBACK, program),
            name,
            "programs cannot be attached to network devices",
            "use a kernel with CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF, or set --tc-devices=none",
        )


def _attaching() -> tuple[Finding, ...]:
    """The two ways to attach programs to devices. One of them is required."""
    tcx_links = _tried(
        _require_tcx,
        "tcx links",
        "programs are attached as tc filters, and other programs can be placed before them",
        _NEWER.format("6.6"),
        needed=False,
    )
    return _clsact()._replace(needed=not tcx_links.present), tcx_links


def _require_tcx() -> None:
    if not tcx.is_supported():
        raise Unsupported("this kernel has no tcx") from OSError(errno.EINVAL, "")


def _places(bpffs_root: Path) -> Iterator[Finding]:
    """The places where other programs run before those that an agent with this bpffs root has attached."""
    ways = attachments.choose(Pins(bpffs_root).devices)
    for ifindex, device in links.names().items():
        for side, place in SIDES.items():
            running = ways.running(ifindex, place)
            if running and running.before:
                yield Finding(
                    f"first place at {side} of {device}",
                    errno.EBUSY,
                    f"programs that run before ebpfproxy: {', '.join(running.before)}",
                    "configure their owner to attach them after it, or remove them",
                    needed=False,
                )


def _xdp_link() -> Finding:
    """Whether a program can be attached to an XDP hook. Tried at a loopback of its own."""
    with contextlib.ExitStack() as stack:
        program = Program.load(XDP, XDP_ATTACH_TYPE, features.RETURN_2)
        stack.callback(program.close)
        stack.enter_context(netns.throw_away())
        return _tried(
            lambda: Link.create_xdp(program, _LOOPBACK, _SKB_MODE).close(),
            "XDP links",
            "--ebpf-xdp has no effect",
            _NEWER.format("5.9"),
            needed=False,
        )


def _xdp_places(bpffs_root: Path, mode: Mode) -> Iterator[Finding]:
    """The devices of an agent with this bpffs root that work without XDP."""
    pins = Pins(bpffs_root)
    ways = attachments.choose(pins.devices)
    served = [ifindex for ifindex in links.names() if ways.running(ifindex, SIDES[INGRESS])]
    for state in xdp.states(served, pins.xdp, mode).values():
        if state.problem:
            yield Finding(
                f"XDP at {state.device.name}", errno.EBUSY, state.problem, state.remedy, needed=False
            )


def _helpers() -> Iterator[Finding]:
    packets = ((each, partial(_load, SCHED_CLS, 0)) for each in features.PROBES)
    sockets = ((each, _load_connect) for each in features.CONNECT_PROBES)
    attempts: list[tuple[features.Probe, Callable[[], object]]] = [
        *((each, partial(load, each.code)) for each, load in (*packets, *sockets)),
        (features.FIB_LOOKUP_SRC, features.require_fib_lookup_src),
    ]
    for each, attempt in attempts:
        name, without, since = HELPERS[each.name]
        yield _tried(attempt, name, without, _NEWER.format(since), needed=False)


def _links() -> Finding:
    return _tried(
        _attach_nowhere,
        "links to cgroups",
        "programs are attached without them, and removing them requires --cgroup-root",
        _NEWER.format("5.7"),
        needed=False,
    )


def _attach_nowhere() -> None:
    """A kernel with cgroup links fails with EBADF, since the cgroup's file descriptor is invalid."""
    program = Program.load(CONNECT4.program_type, CONNECT4.attach_type, features.RETURN_1)
    with contextlib.closing(program):
        try:
            Link.create(program, _NO_FILE, CONNECT4.attach_type).close()
        except KernelError as failure:
            if _number(failure) != errno.EBADF:
                raise


def _reconnecting() -> Finding:
    """Whether file descriptors of other processes may be duplicated.

    A security module may still reject it for single processes. The agent reports that when it happens.
    """
    feature = "reconnecting other processes' sockets"
    missing = "connected UDP sockets keep an endpoint that is gone"
    if capabilities.SYS_PTRACE not in capabilities.capabilities():
        return Finding(feature, errno.EPERM, missing, "grant CAP_SYS_PTRACE", needed=False)
    if os.getpid() == _INIT:
        remedy = "run the pod with hostPID: true"
        return Finding(feature, errno.ESRCH, f"{missing}: processes of pods cannot be seen", remedy, False)
    return _tried(duplicates.try_out, feature, missing, _NEWER.format("5.6"), needed=False)


def _destroying() -> Finding:
    return _tried(
        _destroy_missing,
        "destroying other processes' sockets",
        "--ebpf-stale-udp=destroy has no effect",
        "use a kernel with CONFIG_INET_DIAG_DESTROY and CONFIG_INET_UDP_DIAG",
        needed=False,
    )


def _destroy_missing() -> None:
    """A kernel that supports it fails with ENOENT: no socket has these addresses, ports and cookie."""
    address: Address = unspecified(Family.IPV4)
    missing = sockets.DiagSocket(AF_INET, Protocol.UDP, address, 0, address, 0, cookie=1, interface=0)
    with contextlib.suppress(NotFound):
        sockets.destroy(missing)


# Files


def _cgroup(root: Path | None, allowed: bool) -> Finding:
    """Whether a cgroup v2 root for all sockets exists and, if `allowed`, whether it accepts programs."""

    def attempt() -> None:
        found = root or mounts.cgroup_root_of_all()
        if allowed:
            cgroup.programs(found, CONNECT4.attach_type)
        elif not found.is_dir():
            raise NotFound(f"cgroup {found} does not exist") from OSError(errno.ENOENT, "")

    finding = _tried(attempt, "cgroup v2", "", "")
    if finding.present or finding.remedy:
        return finding
    return finding._replace(
        remedy="set --cgroup-root to the root of cgroup v2, and use a kernel with CONFIG_CGROUP_BPF"
    )


def _bpffs(root: Path) -> Finding:
    number = mounts.bpffs_rejection(root)
    if not number:
        return Finding("bpffs")
    if number == errno.ENODEV:
        return Finding("bpffs", number, "this kernel has none", "use a kernel with CONFIG_BPF_SYSCALL")
    if number == errno.EACCES:
        return Finding("bpffs", number, f"{root} is not writable", "run as root")
    remedy = "mount the host's /sys/fs/bpf into the container, or run it with CAP_SYS_ADMIN"
    return Finding("bpffs", number, f"none is mounted for {root}, and mounting one is not permitted", remedy)


def _compiled() -> tuple[Finding, ...]:
    """The object file; if there is none, what compiling needs."""
    if has_object_file():
        return (Finding("compiled BPF programs"),)
    return _bcc(), _headers()


def _bcc() -> Finding:
    """Search the package without importing it: an import takes a second and 75 MB."""
    spec = importlib.util.find_spec("bcc")
    if spec is None:
        return Finding("bcc", errno.ENOENT, _NO_BCC, compiler.NO_BCC_HINT)
    if any((Path(folder) / "libbcc.py").exists() for folder in spec.submodule_search_locations or ()):
        return Finding("bcc")
    missing = f"{spec.origin} is PyPI's bcc, an unrelated package"
    return Finding("bcc", errno.ENOENT, missing, f"pip uninstall bcc, then {compiler.NO_BCC_HINT}")


def _headers() -> Finding:
    """The C headers that the replacements in bpf/include forward to, and those of the machine's architecture
    that they include."""
    replacements = sorted((abi.source_directory() / "include").rglob("*.h"))
    wanted = [(Path(name),) for each in replacements for name in _FORWARD.findall(each.read_text())]
    common = Path("/usr/include")
    machine = common / str(sysconfig.get_config_var("MULTIARCH") or "")
    for alternatives in (*wanted, (machine / "asm/types.h", common / "asm/types.h")):
        if not any(os.access(path, os.R_OK) for path in alternatives):
            missing = f"{alternatives[0]} is missing"
            return Finding("C headers", errno.ENOENT, missing, "apt-get install linux-libc-dev")
    return Finding("C headers")
