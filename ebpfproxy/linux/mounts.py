"""Where cgroup v2 and bpffs are mounted, and mounting the latter.

Programs that are attached anywhere but at the root of cgroup v2 miss the sockets of everything beside
that cgroup, unnoticed. So the root is proved here, never assumed. Sources: cgroups(7),
cgroup_namespaces(7), mount(2), statfs(2); Documentation/admin-guide/cgroup-v2.rst, "Mounting".
"""

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.errors import KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux import capabilities

CGROUP2_SUPER_MAGIC = 0x63677270
BPF_FS_MAGIC = 0xCAFE4A11

BPFFS = Path("/sys/fs/bpf")
"""The folder that the kernel makes for bpffs (bpf_init() in kernel/bpf/inode.c)."""

_FSOPEN = 430  # on every architecture
_FSOPEN_CLOEXEC = 1
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}  # mangle() in fs/proc_namespace.c

_libc = ctypes.CDLL(None, use_errno=True)


def cgroup2_root(mounts: str = "/proc/mounts") -> Path:
    """The mount of cgroup v2, in unified or hybrid layout: one that is the true root, else the first.

    Whether it is the true root is `is_true_cgroup_root`'s to say. Raises NotFound where there is none.
    """
    found = list(_mounts_of("cgroup2", mounts))
    if not found:
        raise NotFound(
            f"cgroup v2 is not mounted ({mounts})",
            "mount it: mount -t cgroup2 none /sys/fs/cgroup; in a container, mount the host's /sys/fs/cgroup",
        )
    return next(filter(is_true_cgroup_root, found), found[0])


def is_true_cgroup_root(path: Path) -> bool:
    """Whether `path` is the root of the cgroup v2 hierarchy itself; False where there is no such folder.

    The root's inode number is 1: cgroup_setup_root() in kernel/cgroup/cgroup.c checks it, with
    WARN_ON_ONCE(cgroup_ino(root_cgrp) != 1). A mount made in a cgroup namespace shows the namespace's
    root, which is a cgroup below with a number of its own; so does a bind mount of a subfolder.
    """
    try:
        return _file_system(path) == CGROUP2_SUPER_MAGIC and path.stat().st_ino == 1
    except OSError:
        return False


def host_cgroup2_root(init: Path = Path("/proc/1")) -> Path:
    """The true root of cgroup v2 as the agent can reach it: its own mount, else the host's through `init`.

    `init` is the proc folder of a process that has the host's mounts. A cgroup that is not the true
    root is never returned.

    Raises NotFound where neither is, Unsupported where looking through `init` is not permitted.
    """
    seen: list[str] = []
    for path in _cgroup2_candidates(init):
        if is_true_cgroup_root(path):
            return path
        seen.append(str(path))
    raise NotFound(
        f"the root of cgroup v2 is not to be found; seen: {', '.join(seen) or 'no mount'}",
        "give the container hostPID, or mount the host's /sys/fs/cgroup into it",
    )


def cgroup_root_of_all() -> Path:
    """The cgroup that catches the sockets of all processes of the host, unless the configuration names it.

    Raises Unsupported where it is not in reach, but at most a part of it.
    """
    try:
        return host_cgroup2_root()
    except NotFound as failure:
        raise Unsupported(
            f"{failure.message}: other pods' sockets would not be caught",
            "run with hostPID, or mount the host's /sys/fs/cgroup and name it with --cgroup-root",
        ) from failure


def _cgroup2_candidates(init: Path) -> Iterator[Path]:
    """Our own mounts, then those of `init`, reached through its root folder."""
    yield from _mounts_of("cgroup2", "/proc/mounts")
    try:
        os.stat(init / "root/.")  # noqa: PTH116  (so that "not permitted" does not look like "not there")
        theirs = list(_mounts_of("cgroup2", f"{init}/mounts"))
    except PermissionError as error:
        raise Unsupported(
            f"the mounts of {init} cannot be looked into: {error.strerror}",
            "it takes hostPID and a privileged container, or the host's /sys/fs/cgroup mounted into it",
        ) from error
    except OSError as error:
        raise NotFound(f"the root of cgroup v2 is not to be found: {init}: {error.strerror}") from error
    for mount in theirs:
        yield init / "root" / mount.relative_to("/")


def ensure_bpffs(path: Path) -> bool:
    """Have `path` be a folder on a bpffs; whether one had to be mounted for it.

    Where its nearest existing folder is on a bpffs, only folders are made. Else a bpffs is mounted: at
    `BPFFS` for a path at or below that (sysfs allows no new folders), otherwise at `path` itself.

    Raises Unsupported without CAP_SYS_ADMIN or bpffs in the kernel, else Rejected.
    """
    try:
        mounted = not is_bpffs(_nearest_existing(path))
    except PermissionError as error:
        raise _not_permitted(path) from error
    target = BPFFS if path.is_relative_to(BPFFS) else path
    if mounted:
        _make_folders(target)
        _mount_bpffs(target)
    _make_folders(path)
    return mounted


def bpffs_rejection(path: Path) -> int:
    """The errno for which `ensure_bpffs` would fail; 0 where it would not. Nothing is made or mounted.

    fsopen(2) of Linux 5.2 (24dcb3d90a1f) finds the file system and asks for the capability. Where there is no
    such call, it is looked up whether the kernel has bpffs, and whether we have CAP_SYS_ADMIN.
    """
    try:
        nearest = _nearest_existing(path)
        if is_bpffs(nearest):
            return 0 if os.access(nearest, os.W_OK | os.X_OK) else errno.EACCES
    except (PermissionError, Rejected):
        return errno.EACCES
    fd = _libc.syscall(_FSOPEN, b"bpf", _FSOPEN_CLOEXEC)
    if fd >= 0:
        os.close(fd)
        return 0
    number = ctypes.get_errno()
    if number != errno.ENOSYS:
        return number
    if "\tbpf\n" not in Path("/proc/filesystems").read_text():
        return errno.ENODEV
    return 0 if capabilities.SYS_ADMIN in capabilities.capabilities() else errno.EPERM


def is_bpffs(path: Path) -> bool:
    """Whether `path` is on a bpffs; False where it does not exist. Raises Rejected where we may not look."""
    try:
        return _file_system(path) == BPF_FS_MAGIC
    except PermissionError as error:
        raise _not_permitted(path) from error
    except OSError:
        return False


def is_mounted_for(process: Path, path: Path) -> bool:
    """Whether the file system that `path` is on is in that process's mounts, too, wherever it is there.

    `process` is its folder in proc. Raises OSError where either may not be looked at, or is not there.
    """
    device = os.stat(path).st_dev  # noqa: PTH116  (beside os.major)
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with (process / "mountinfo").open() as lines:  # proc_pid_mountinfo(5): the third field
        return any(line.split(" ", 3)[2] == wanted for line in lines)


def _not_permitted(path: Path) -> Rejected:
    return Rejected(f"{path} cannot be looked at: {os.strerror(errno.EACCES)}", "run as root")


def unmount(path: Path) -> None:
    """Take the uppermost mount at `path` away.

    Raises NotFound where nothing is mounted there, Rejected where it is in use.
    """
    if _libc.umount2(os.fsencode(path), 0) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOENT):
        raise NotFound(f"nothing is mounted at {path}")
    raise _rejection(f"unmounting {path}", code)


def _mounts_of(kind: str, mounts: str) -> Iterator[Path]:
    """Mount points of one file system type, in the order in which they were mounted."""
    try:
        text = Path(mounts).read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) > 2 and fields[2] == kind:
            yield Path(_unescaped(fields[1]))


def _unescaped(text: str) -> str:
    r"""A path as /proc/mounts writes it, with blanks as octal numbers.

    >>> _unescaped(r"/mnt/a\040folder")
    '/mnt/a folder'
    """
    for escape, character in _ESCAPES.items():  # the backslash last
        text = text.replace(escape, character)
    return text


class _Statfs(ctypes.Structure):
    """struct statfs as far as it is of use: f_type comes first, as a long on the 64-bit machines we serve."""

    _fields_ = (("type", ctypes.c_long), ("rest", ctypes.c_byte * 512))


def _file_system(path: Path) -> int:
    """The magic number of the file system that `path` is on. Raises OSError."""
    result = _Statfs()
    if _libc.statfs(os.fsencode(path), ctypes.byref(result)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return int(result.type) & 0xFFFFFFFF


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _make_folders(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except PermissionError as error:
        raise Rejected(f"folder {path} cannot be made: {error.strerror}", "run as root") from error
    except OSError as error:
        raise Rejected(f"folder {path} cannot be made: {error.strerror}") from error


def _mount_bpffs(target: Path) -> None:
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if _libc.mount(b"bpf", os.fsencode(target), b"bpf", ctypes.c_ulong(flags), b"mode=0700") != 0:
        raise _rejection(f"mounting bpffs at {target}", ctypes.get_errno())


def _rejection(what: str, code: int) -> KernelError:
    if code in (errno.EPERM, errno.EACCES):
        return Unsupported(
            f"{what} is not permitted: {os.strerror(code)}", "it takes the capability CAP_SYS_ADMIN"
        )
    if code == errno.ENODEV:
        return Unsupported(f"{what} failed: this kernel has no bpffs", "use a kernel with CONFIG_BPF_SYSCALL")
    return Rejected(f"{what} failed: {os.strerror(code)}")
