"""The eBPF backend's probes: on this machine, and with some features taken away."""

import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.backends.ebpf import probes
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.backends.ebpf.programs import has_object_file, object_file
from ebpfproxy.backends.findings import Finding
from ebpfproxy.errors import Rejected
from ebpfproxy.linux import mounts
from ebpfproxy.linux.bpf import bpf, cgroup, tc, tcx
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.linux.netns import netns
from tests.support.bpf_place import bpf_place
from tests.support.confined import Rejections, as_nobody, rejecting, without

pytestmark = pytest.mark.kernel

BPF, CLSACT, COOKIE = "bpf(2)", "clsact with bpf filters", "the network namespace's cookie"
TCX = "tcx links"
RECONNECTING = "reconnecting other processes' sockets"
BPFFS = "/sys/fs/bpf/ebpfproxy-probes"
COMPILED = "compiled BPF programs"
FSOPEN = 430
NO_BCC = "sys.path = [path for path in sys.path if not os.path.exists(f'{path}/bcc')]"
NO_OBJECTS = """
from ebpfproxy.linux.bpf import object_cache
object_cache.SHIPPED = object_cache.FOLDER = Path("/nonexistent")
"""
SCRIPT = """
import json, os, sys
from pathlib import Path
{prelude}
from ebpfproxy.backends.ebpf.probes import probe
root, cgroup, devices = json.loads(sys.argv[1])
print(json.dumps([probe(Path(root), Path(cgroup) if cgroup else None, devices), sorted(sys.modules)]))
"""


def look(
    *before: str, prelude: str = "", root: str | Path = BPFFS, cgroup: str = "", devices: bool = True
) -> dict[str, Finding]:
    """The findings of a new process by feature; `before`: a command prefix that restricts it."""
    arguments = json.dumps([str(root), cgroup, devices])
    script = SCRIPT.format(prelude=prelude)
    done = subprocess.run(
        [*before, sys.executable, "-c", script, arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, modules = json.loads(done.stdout)
    assert not {"bcc", "pyroute2"} & set(modules), "importing them would take too long"
    return {finding.feature: finding for finding in (Finding(*each) for each in found)}


def apart(*commands: str) -> list[str]:
    """A command prefix: new mount and PID namespaces, in which these commands run first."""
    return [
        *("unshare", "--mount", "--pid", "--fork", "--mount-proc"),
        *("sh", "-ec", "; ".join((*commands, 'exec "$0" "$@"'))),
    ]


def missing(found: dict[str, Finding]) -> set[str]:
    return {name for name, finding in found.items() if not finding.present}


def test_all_needed_features_are_found_on_this_machine() -> None:
    """Otherwise no test of this level would run."""
    found = look()
    assert [name for name in missing(found) if found[name].needed] == []
    assert all(not finding.missing and not finding.remedy for finding in found.values() if finding.present)
    hooks = {f"cgroup hook {hook.name}": not hook.optional for hook in SOCKET_HOOKS}
    assert {name: found[name].needed for name in hooks} == hooks
    assert all(found[name].needed for name in (BPF, COOKIE, "cgroup v2", "bpffs"))
    assert (COMPILED in found) is has_object_file()
    assert found[CLSACT].needed is not found[TCX].present


def test_without_devices_clsact_is_not_needed() -> None:
    assert CLSACT not in look(devices=False)


def test_probes_leave_nothing_behind(tmp_path: Path) -> None:
    with bpf_place() as place:
        descriptors, namespace = sorted(os.listdir("/proc/self/fd")), netns.cookie()  # noqa: PTH208
        for root in (place.bpffs / "agent", tmp_path / "agent"):
            probes.probe(root, place.cgroup, True)
            assert not root.exists()
        assert list(place.bpffs.glob("[!mp]*")) == []
        assert not mounts.is_bpffs(tmp_path)
        assert not tc.has_clsact(1)
        assert netns.cookie() == namespace
        assert sorted(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


# bpf(2)


@pytest.mark.parametrize(
    ("capability", "number"), [("bpf", errno.EPERM), ("net_admin", errno.EPERM), ("perfmon", errno.EACCES)]
)
def test_a_missing_capability_is_named(capability: str, number: int) -> None:
    found = look(*without(capability, "sys_admin"))
    assert found[BPF].failure == number
    assert f"without CAP_{capability.upper()} it" in found[BPF].missing
    assert found[BPF].remedy
    assert "cgroup hook connect4" not in found, "without bpf(2), hooks cannot be tried"
    assert found["cgroup v2"].present, "cgroup v2 does not need bpf(2)"


def test_without_any_capability_all_missing_ones_are_named() -> None:
    found = look(*without("all"))
    assert "CAP_BPF and CAP_NET_ADMIN and CAP_PERFMON" in found[BPF].missing


def test_without_sys_admin_a_mounted_bpffs_is_sufficient(tmp_path: Path) -> None:
    """clsact needs a network namespace for a trial, which cannot be created. So it is not reported
    missing."""
    with bpf_place() as place:
        found = look(*without("sys_admin"), root=place.bpffs / "agent")
        assert missing(found) == {CLSACT}
        assert not found[CLSACT].needed
        assert "cannot be tested" in found[CLSACT].missing
    found = look(*without("sys_admin"), root=tmp_path / "agent")
    assert missing(found) == {CLSACT, "bpffs"}
    assert found["bpffs"].failure == errno.EPERM
    assert "CAP_SYS_ADMIN" in found["bpffs"].remedy


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_seccomp_filter_is_distinguished_from_missing_capabilities(number: int) -> None:
    found = look(*rejecting(Rejections(bpf.syscall_number(), number)))
    assert found[BPF].failure == number
    assert "seccomp" in found[BPF].missing
    assert "privileged" in found[BPF].remedy


def test_a_process_in_a_user_namespace_gets_a_specific_remedy() -> None:
    """In a user namespace the process has all capabilities, but none in the initial namespace."""
    found = look("unshare", "--user", "--map-root-user")
    assert found[BPF].failure == errno.EPERM
    assert "in spite of the required capabilities" in found[BPF].missing
    assert "user namespaces" in found[BPF].remedy


def test_an_unprivileged_user_is_advised_to_run_as_root() -> None:
    with bpf_place() as place:
        found = look(*as_nobody(), root=place.bpffs / "agent")
    assert found["bpffs"].failure == errno.EACCES
    assert found["bpffs"].remedy == "run as root"


# Other requirements


def test_without_cgroup_v2_the_remedy_is_named() -> None:
    found = look(*apart("umount -a -t cgroup2"))
    assert missing(found) - {RECONNECTING} == {"cgroup v2"}
    assert found["cgroup v2"].failure == errno.ENOENT
    assert "--cgroup-root" in found["cgroup v2"].remedy


@pytest.mark.parametrize(("name", "number"), [("", errno.EBADF), ("missing", errno.ENOENT)])
def test_a_directory_that_is_not_a_cgroup_is_reported(tmp_path: Path, name: str, number: int) -> None:
    folder = str(tmp_path / name)
    found = look(cgroup=folder)
    assert missing(found) == {"cgroup v2"}
    assert found["cgroup v2"].failure == number
    assert folder in found["cgroup v2"].missing
    assert "--cgroup-root" in found["cgroup v2"].remedy
    without_bpf = look(*without("all"), cgroup=str(tmp_path / "missing"))
    assert without_bpf["cgroup v2"].failure == errno.ENOENT


def test_without_fsopen_bpffs_is_probed_in_another_way(tmp_path: Path) -> None:
    """fsopen was added in Linux 5.2."""
    hidden = rejecting(Rejections(FSOPEN, errno.ENOSYS))
    assert look(*hidden, root=tmp_path / "agent")["bpffs"].present
    found = look(*without("sys_admin"), *hidden, root=tmp_path / "agent")
    assert found["bpffs"].failure == errno.EPERM


def test_without_an_object_file_the_compiler_is_needed() -> None:
    found = look(prelude=NO_OBJECTS)
    assert all(found[name].needed and found[name].present for name in ("bcc", "C headers"))
    assert COMPILED not in found


def test_with_an_object_file_no_compiler_is_needed() -> None:
    object_file()
    found = look(
        *apart("mount -t tmpfs none /usr/include"),
        prelude=NO_BCC,
    )
    assert found[COMPILED].present
    assert not {"bcc", "C headers"} & found.keys()


def test_without_bcc_the_remedy_is_named() -> None:
    found = look(
        prelude=f"{NO_OBJECTS}\nsys.path = [path for path in sys.path if not os.path.exists(f'{{path}}/bcc')]"
    )
    assert missing(found) == {"bcc"}
    assert "no object file" in found["bcc"].missing
    assert "image variant with bcc" in found["bcc"].remedy
    assert "python3-bpfcc" in found["bcc"].remedy


def test_the_unrelated_bcc_package_of_pypi_is_detected(tmp_path: Path) -> None:
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc" / "__init__.py").write_text("raise AssertionError('must not be imported')")
    found = look(prelude=f"{NO_OBJECTS}\nsys.path.insert(0, {str(tmp_path)!r})")
    assert missing(found) == {"bcc"}
    assert "PyPI" in found["bcc"].missing
    assert "pip uninstall bcc" in found["bcc"].remedy


def test_a_missing_c_header_is_named() -> None:
    found = look(*apart("mount -t tmpfs none /usr/include"), prelude=NO_OBJECTS)
    assert missing(found) - {RECONNECTING} == {"C headers"}
    assert found["C headers"].missing.startswith("/usr/include/linux/")
    assert "linux-libc-dev" in found["C headers"].remedy


# Features that a kernel may lack, simulated by rejected calls

Refuses = Callable[[int, bytes], bool]


def lacking(
    monkeypatch: pytest.MonkeyPatch, rejects: Refuses, number: int = errno.EINVAL
) -> dict[str, Finding]:
    """The findings on a kernel that rejects these bpf(2) calls, by command and attributes."""
    real = bpf.bpf

    def answer(command: int, attr: bytes, what: str) -> tuple[int, bytes]:
        if rejects(command, attr):
            raise bpf.error(number, what)
        return real(command, attr, what)

    for module in (bpf, cgroup):
        monkeypatch.setattr(module, "bpf", answer)
    return probe_here()


def probe_here() -> dict[str, Finding]:
    found = probes.probe(Path(BPFFS), None, True)
    return {finding.feature: finding for finding in found}


@pytest.mark.parametrize("hook", SOCKET_HOOKS, ids=lambda hook: hook.name)
def test_a_missing_hook_is_named(monkeypatch: pytest.MonkeyPatch, hook: Any) -> None:
    def rejects(command: int, attr: bytes) -> bool:
        (type_,), (attach_type,) = (
            struct.unpack_from("=I", attr),
            struct.unpack_from("=I", attr[68:] or bytes(4)),
        )
        return command == bpf.PROG_LOAD and (type_, attach_type) == (hook.program_type, hook.attach_type)

    found = lacking(monkeypatch, rejects)
    finding = found[f"cgroup hook {hook.name}"]
    assert (finding.failure, finding.needed) == (errno.EINVAL, not hook.optional)
    assert finding.missing
    assert f"Linux {hook.since}" in finding.remedy


@pytest.mark.parametrize(
    ("name", "type_", "flags"),
    [
        ("maps of the kind LRU hash", 9, 0),
        ("maps of the kind LPM trie", 11, 1),
        ("maps that are written through memory", 2, 1 << 10),
        ("ring buffers", 27, 0),
    ],
)
def test_an_unsupported_map_type_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, type_: int, flags: int
) -> None:
    def rejects(command: int, attr: bytes) -> bool:
        return command == bpf.MAP_CREATE and struct.unpack_from("=I12xI", attr) == (type_, flags)

    found = lacking(monkeypatch, rejects)
    assert missing(found) == {name}
    assert found[name].needed


ALSO_MISSING = {COOKIE: {"bpf_get_netns_cookie in tc programs"}, "bpf_fib_lookup": {"BPF_FIB_LOOKUP_SRC"}}
"""Findings that are about the same helper."""


@pytest.mark.parametrize(
    ("name", "helper", "needed"),
    [
        ("bpf_sk_lookup_udp", 85, False),
        ("bpf_fib_lookup", 69, False),
        ("bpf_skc_lookup_tcp", 99, False),
        ("bpf_redirect_neigh", 152, False),
        ("bpf_redirect_peer", 155, False),
        ("bpf_ktime_get_coarse_ns", 160, False),
        ("bpf_set_retval", 187, False),
        ("bpf_skc_to_mptcp_sock", 196, False),
        (COOKIE, 122, True),
    ],
)
def test_a_missing_helper_is_named_with_the_consequence(
    monkeypatch: pytest.MonkeyPatch, name: str, helper: int, needed: bool
) -> None:
    call = bytes((0x85, 0, 0, 0)) + helper.to_bytes(4, "little")

    def rejects(command: int, attr: bytes) -> bool:
        if command != bpf.PROG_LOAD:
            return False
        count, at = struct.unpack_from("=IQ", attr, 4)
        return call in ctypes.string_at(at, count * 8)

    found = lacking(monkeypatch, rejects)
    assert missing(found) == {name} | ALSO_MISSING.get(name, set())
    assert found[name].needed == needed
    assert found[name].missing
    assert "Linux" in found[name].remedy


def test_cgroup_links_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lacking(monkeypatch, lambda command, attr: command == bpf.LINK_CREATE)
    assert missing(found) == {"links to cgroups"}
    assert not found["links to cgroups"].needed


def test_a_cgroup_that_accepts_no_programs_is_distinguished_from_a_missing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Like a kernel without CONFIG_CGROUP_BPF. Nothing is attached to this machine's cgroup root."""
    found = lacking(monkeypatch, lambda command, attr: command == bpf.PROG_QUERY)
    assert missing(found) == {"cgroup v2"}
    assert found["cgroup v2"].failure == errno.EINVAL
    assert "CONFIG_CGROUP_BPF" in found["cgroup v2"].remedy


@pytest.mark.parametrize(
    ("kind", "number", "name", "needed"),
    [
        (tc.RTM_NEWQDISC, errno.ENOENT, CLSACT, True),
        (tc.RTM_NEWTFILTER, errno.ENOENT, CLSACT, True),
        (21, errno.EOPNOTSUPP, "destroying other processes' sockets", False),
    ],
)
def test_a_missing_netlink_feature_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: int, number: int, name: str, needed: bool
) -> None:
    real = netlink.change

    def change(protocol: int, asked: int, body: bytes, flags: int = 0) -> None:
        if asked == kind:
            raise OSError(number, os.strerror(number))
        real(protocol, asked, body, flags)

    monkeypatch.setattr(netlink, "change", change)
    monkeypatch.setattr(tcx, "is_supported", lambda: False)
    found = probe_here()
    assert missing(found) == {name, TCX}
    assert (found[name].failure, found[name].needed) == (number, needed)


def test_clsact_is_needed_only_without_tcx(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported in (True, False):
        monkeypatch.setattr(tcx, "is_supported", lambda value=supported: value)
        found = probe_here()
        assert (found[TCX].present, found[TCX].needed) == (supported, False)
        assert found[CLSACT].needed is not supported


def test_reconnecting_sockets_needs_sys_ptrace_and_the_hosts_processes() -> None:
    found = look("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
    assert missing(found) == {RECONNECTING}
    assert found[RECONNECTING].remedy == "grant CAP_SYS_PTRACE"
    assert not found[RECONNECTING].needed
    assert "hostPID" in look(*apart("true"))[RECONNECTING].remedy


def test_reconnecting_sockets_needs_system_calls() -> None:
    found = look(*rejecting(Rejections(438, errno.ENOSYS)))
    assert missing(found) == {RECONNECTING}
    assert "5.6" in found[RECONNECTING].remedy


def test_map_batch_operations_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object) -> None:
        raise Rejected("cannot access map unnamed in batches: Invalid argument") from OSError(
            errno.EINVAL, "Invalid argument"
        )

    monkeypatch.setattr(bpf.Map, "update_all", reject)
    found = probe_here()
    assert missing(found) == {"batches of map entries"}
    assert found["batches of map entries"].needed
