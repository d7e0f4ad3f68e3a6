"""The mounts of cgroup v2 and bpffs: finding both, mounting bpffs.

A program that is attached below the root of cgroup v2 misses the sockets of all other cgroups, without an
error. Therefore this module verifies that a cgroup is the root. Sources: cgroups(7), cgroup_namespaces(7),
mount(2), statfs(2); Documentation/admin-guide/cgroup-v2.rst, "Mounting".
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
"""The mount point that the kernel creates for bpffs (bpf_init() in kernel/bpf/inode.c)."""

_FSOPEN = 430  # on every architecture
_FSOPEN_CLOEXEC = 1
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}  # mangle() in fs/proc_namespace.c

_libc = ctypes.CDLL(None, use_errno=True)


def cgroup2_root(mounts: str = "/proc/mounts") -> Path:
    """A mount of cgroup v2, in unified or hybrid layout: one of the true root if it exists, else the first.

    Use `is_true_cgroup_root` to distinguish the two. Raises NotFound if cgroup v2 is not mounted.
    """
    found = list(_mounts_of("cgroup2", mounts))
    if not found:
        raise NotFound(
            f"cgroup v2 is not mounted ({mounts})",
            "mount it: mount -t cgroup2 none /sys/fs/cgroup; in a container, mount the host's /sys/fs/cgroup",
        )
    return next(filter(is_true_cgroup_root, found), found[0])


def is_true_cgroup_root(path: Path) -> bool:
    """Whether `path` is the root of the cgroup v2 hierarchy. False if the folder does not exist.

    The root has inode number 1: cgroup_setup_root() in kernel/cgroup/cgroup.c checks it with
    WARN_ON_ONCE(cgroup_ino(root_cgrp) != 1). A mount made in a cgroup namespace shows the root of the
    namespace, a descendant with another inode number. So does a bind mount of a subfolder.
    """
    try:
        return _file_system(path) == CGROUP2_SUPER_MAGIC and path.stat().st_ino == 1
    except OSError:
        return False


def host_cgroup2_root(init: Path = Path("/proc/1")) -> Path:
    """The true root of cgroup v2, through a mount of this process or else through a mount of `init`.

    `init` is the proc folder of a process in the host's mount namespace.

    Raises NotFound if no mount shows the true root, Unsupported if the mounts of `init` cannot be accessed.
    """
    other_cgroups: list[str] = []
    for path in _cgroup2_candidates(init):
        if is_true_cgroup_root(path):
            return path
        other_cgroups.append(str(path))
    raise NotFound(
        f"cannot find the root of cgroup v2; mounted: {', '.join(other_cgroups) or 'nothing'}",
        "give the container hostPID, or mount the host's /sys/fs/cgroup into it",
    )


def cgroup_root_of_all() -> Path:
    """The cgroup that contains all processes of the host: the default if none is configured.

    Raises Unsupported if it cannot be accessed.
    """
    try:
        return host_cgroup2_root()
    except NotFound as failure:
        raise Unsupported(
            f"{failure.message}: hooks would miss the sockets of other pods",
            "run with hostPID, or mount the host's /sys/fs/cgroup and set --cgroup-root to its path",
        ) from failure


def _cgroup2_candidates(init: Path) -> Iterator[Path]:
    """The mounts of this process, then those of `init`, as paths below its root folder in proc."""
    yield from _mounts_of("cgroup2", "/proc/mounts")
    try:
        # stat() raises PermissionError where Path.exists() would only return False.
        os.stat(init / "root/.")  # noqa: PTH116
        init_mounts = list(_mounts_of("cgroup2", f"{init}/mounts"))
    except PermissionError as error:
        raise Unsupported(
            f"cannot access the mounts of {init}: {error.strerror}",
            "run in a privileged container with hostPID, or mount the host's /sys/fs/cgroup into it",
        ) from error
    except OSError as error:
        raise NotFound(f"cannot find the root of cgroup v2: {init}: {error.strerror}") from error
    for mount in init_mounts:
        yield init / "root" / mount.relative_to("/")


def ensure_bpffs(path: Path) -> bool:
    """Make `path` a folder on a bpffs; return whether a bpffs was mounted for it.

    If the nearest existing folder is on a bpffs, only folders are created. Otherwise a bpffs is mounted: at
    `BPFFS` if `path` is `BPFFS` or below it, because sysfs allows no new folders; else at `path`.

    Raises Unsupported without CAP_SYS_ADMIN or without bpffs in the kernel, else Rejected.
    """
    must_mount = not is_on_bpffs(path)
    mount_point = BPFFS if path.is_relative_to(BPFFS) else path
    if must_mount:
        _make_folders(mount_point)
        _mount_bpffs(mount_point)
    _make_folders(path)
    return must_mount


def bpffs_rejection(path: Path) -> int:
    """The errno with which `ensure_bpffs` would fail, 0 if it would succeed. Creates and mounts nothing.

    fsopen(2), since Linux 5.2 (24dcb3d90a1f), checks for the file system and for the capability. Without
    this call, the function reads /proc/filesystems and checks for CAP_SYS_ADMIN.
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
    """Whether `path` is on a bpffs; False if it does not exist. Raises Rejected if it may not be accessed."""
    try:
        return _file_system(path) == BPF_FS_MAGIC
    except PermissionError as error:
        raise _not_permitted(path) from error
    except OSError:
        return False


def is_on_bpffs(path: Path) -> bool:
    """Whether `path`, or the nearest existing folder above it, is on a bpffs. Raises Rejected if it may not
    be accessed."""
    try:
        return is_bpffs(_nearest_existing(path))
    except PermissionError as error:
        raise _not_permitted(path) from error


def is_mounted_for(process: Path, path: Path) -> bool:
    """Whether the file system of `path` is also mounted, anywhere, in the mount namespace of a process.

    `process` is its folder in proc. Raises OSError if either cannot be accessed.
    """
    device = os.stat(path).st_dev  # noqa: PTH116
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with (process / "mountinfo").open() as lines:  # proc_pid_mountinfo(5): the third field
        return any(line.split(" ", 3)[2] == wanted for line in lines)


def _not_permitted(path: Path) -> Rejected:
    return Rejected(f"cannot access {path}: {os.strerror(errno.EACCES)}", "run as root")


def unmount(path: Path) -> None:
    """Unmount the topmost mount at `path`.

    Raises NotFound if nothing is mounted there, Rejected if it is in use.
    """
    if _libc.umount2(os.fsencode(path), 0) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOENT):
        raise NotFound(f"nothing is mounted at {path}")
    raise _rejection(f"unmount {path}", code)


def _mounts_of(kind: str, mounts: str) -> Iterator[Path]:
    """Mount points of one file system type, in mount order. Empty if the file `mounts` does not exist."""
    try:
        text = Path(mounts).read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) > 2 and fields[2] == kind:
            yield Path(_unescaped(fields[1]))


def _unescaped(text: str) -> str:
    r"""The path that /proc/mounts writes with octal escapes for blanks and backslashes.

    >>> _unescaped(r"/mnt/a\040folder")
    '/mnt/a folder'
    """
    for escape, character in _ESCAPES.items():  # the backslash is the last one
        text = text.replace(escape, character)
    return text


class _Statfs(ctypes.Structure):
    """The start of struct statfs: f_type, a long on 64-bit machines (only these are supported)."""

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
        raise Rejected(f"cannot create the folder {path}: {error.strerror}", "run as root") from error
    except OSError as error:
        raise Rejected(f"cannot create the folder {path}: {error.strerror}") from error


def _mount_bpffs(target: Path) -> None:
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if _libc.mount(b"bpf", os.fsencode(target), b"bpf", ctypes.c_ulong(flags), b"mode=0700") != 0:
        raise _rejection(f"mount bpffs at {target}", ctypes.get_errno())


def _rejection(action: str, code: int) -> KernelError:
    """`action` completes "cannot ..."."""
    message = f"cannot {action}: {os.strerror(code)}"
    if code in (errno.EPERM, errno.EACCES):
        return Unsupported(message, "run with the capability CAP_SYS_ADMIN")
    if code == errno.ENODEV:
        return Unsupported(f"{message}: this kernel has no bpffs", "use a kernel with CONFIG_BPF_SYSCALL")
    return Rejected(message)
