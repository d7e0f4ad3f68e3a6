"""bpf(2): maps, programs and links by direct system calls. This takes 0.1 MB; libbpf or bcc take 75 MB.

Keys and values are bytes in the machine's own layout. The caller interprets them. Each object owns its file
descriptor, and `close` closes it. Each call packs the part of `union bpf_attr` that it uses. See
include/uapi/linux/bpf.h for its layout.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import platform
import resource
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, TableFull, Unsupported

MAP_CREATE, MAP_LOOKUP_ELEM, MAP_UPDATE_ELEM, MAP_DELETE_ELEM, MAP_GET_NEXT_KEY = 0, 1, 2, 3, 4
PROG_LOAD, OBJ_PIN, OBJ_GET, PROG_ATTACH, PROG_DETACH, PROG_TEST_RUN = 5, 6, 7, 8, 9, 10
PROG_GET_FD_BY_ID, OBJ_GET_INFO_BY_FD, PROG_QUERY = 13, 15, 16
MAP_LOOKUP_BATCH, MAP_UPDATE_BATCH, MAP_DELETE_BATCH = 24, 26, 27
LINK_CREATE, LINK_UPDATE, LINK_DETACH = 28, 29, 34

PERCPU_TYPES = frozenset({5, 6, 10})  # BPF_MAP_TYPE_PERCPU_HASH, _PERCPU_ARRAY, _LRU_PERCPU_HASH
ENOTSUPP = 524  # the kernel's internal error number, which has no name in user space

_SYSCALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "loongarch64": 280, "s390x": 351, "ppc64le": 361}
_libc = ctypes.CDLL(None, use_errno=True)
_BEFORE = 1 << 3  # BPF_F_BEFORE
_XDP_ATTACH_TYPE = 37  # BPF_XDP
_ATTEMPTS = 5  # the same as in libbpf's sys_bpf_prog_load()
_NOT_NOW = frozenset({errno.EPERM, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
BUSY = frozenset({errno.EBUSY, errno.EDEADLK, errno.ETIMEDOUT})
"""A bucket of a hash map was locked. EBUSY: since Linux 5.11 (20b6cc34ea74). The others: since 6.15."""
_REFILL = 0.005  # seconds
_REFILLS = 20  # in succession, without an entry that was written
_CHUNK = 4096  # entries per batch: large enough to be cheap, small enough not to hold a CPU for long


def syscall_number() -> int:
    """The system call number of bpf(2) on this machine. Raises Unsupported if it is unknown."""
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise Unsupported(f"bpf(2) has no known number on {platform.machine()}")
    return number


def bpf(command: int, attr: bytes, what: str) -> tuple[int, bytes]:
    """One call. Returns its result, and `attr` as the kernel changed it.

    Raises KernelError with `what` as the start of its message.
    """
    buffer = ctypes.create_string_buffer(attr, len(attr))
    result = _libc.syscall(syscall_number(), command, buffer, len(attr))
    if result < 0:
        raise error(ctypes.get_errno(), what)
    return result, buffer.raw


def error(number: int, what: str) -> KernelError:
    """The error of ebpfproxy.errors for `number` (an errno), which is the errno of its cause."""
    kinds: dict[int, type[KernelError]] = {
        errno.ENOENT: NotFound,
        errno.EEXIST: AlreadyExists,
        errno.E2BIG: TableFull,
        errno.ENOSYS: Unsupported,
        errno.EOPNOTSUPP: Unsupported,
        ENOTSUPP: Unsupported,
    }
    hint = "run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON" if number == errno.EPERM else ""
    reason = "not supported" if number == ENOTSUPP else os.strerror(number)
    found = kinds.get(number, Rejected)(f"{what}: {reason}", hint)
    found.__cause__ = OSError(number, reason)
    return found


def errno_of(failure: KernelError) -> int:
    """The errno that caused an error of this module. 0 if there is none."""
    cause = failure.__cause__
    return cause.errno or 0 if isinstance(cause, OSError) else 0


def _await_refill(failure: Rejected, refills: int) -> int:
    """Wait until the kernel has refilled its memory for new entries, and return the number of such waits.

    A hash map without preallocation takes them from a cache of about 100 per CPU, which irq_work refills
    (Linux 6.1, 7c8199e24fa0). Where irq_work waits for a thread or for the next tick (PREEMPT_RT, user-mode
    Linux), many writes empty it. Raises `failure` if it has another reason, or after _REFILLS waits.
    """
    if errno_of(failure) != errno.ENOMEM or refills == _REFILLS:
        raise failure
    time.sleep(_REFILL)
    return refills + 1


@functools.cache
def _unlimit() -> None:
    """Raise the limit of locked memory.

    Before Linux 5.11 it includes all maps and programs of root together. An agent that restarts while its
    maps are pinned could not create another map.
    """
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))
    with contextlib.suppress(OSError, ValueError):  # exceeding the hard limit requires CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class MapFacts(NamedTuple):
    """The first fields of struct bpf_map_info. Sizes are in bytes. For per-CPU maps, `value_size` is that of
    one CPU's value."""

    type: int
    id: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int
    name: str


class _Object:
    """A kernel object with a file descriptor. It can be pinned to a path."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name

    def pin(self, path: Path) -> None:
        """Pin the object. Raises AlreadyExists.

        bpffs allows no dots in names (kernel/bpf/inode.c, bpf_lookup).
        """
        name = ctypes.create_string_buffer(os.fsencode(path))
        bpf(OBJ_PIN, struct.pack("=QII", ctypes.addressof(name), self.fd, 0), f"cannot pin {path}")

    def facts(self, size: int, template: bytes = b"") -> bytes:
        """BPF_OBJ_GET_INFO_BY_FD: the first `size` bytes of the kernel's description."""
        buffer = ctypes.create_string_buffer(template, size)
        attr = struct.pack("=IIQ", self.fd, size, ctypes.addressof(buffer))
        bpf(OBJ_GET_INFO_BY_FD, attr, f"cannot describe {self.name}")
        return buffer.raw

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pinned_fd(path: Path, kind: str) -> int:
    """Open a pin. `kind`: "map", "prog" or "link". It is checked, since the kernel opens any kind of pin."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    try:
        fd, _ = bpf(OBJ_GET, struct.pack("=QII", ctypes.addressof(name), 0, 0), f"cannot open {path}")
    except Rejected as failure:
        if errno_of(failure) == errno.EACCES:  # because of the path's permissions, not of a capability
            failure.hint = "run as root"
        raise
    try:
        found = str(Path(f"/proc/self/fd/{fd}").readlink())  # "anon_inode:bpf-map", "anon_inode:bpf_link"
    except OSError as failure:
        os.close(fd)
        raise error(failure.errno or 0, f"cannot describe {path}") from failure
    if not found.endswith(kind):
        os.close(fd)
        raise Rejected(f"{path} is not a {kind} but {found}")
    return fd


class Map(_Object):
    """A BPF map. If entries change during an iteration, it may miss or repeat an entry."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(fd, name)
        try:
            *numbers, text = struct.unpack_from("=IIIIII16s", self.facts(40))
        except KernelError:
            self.close()
            raise
        self.shape = MapFacts._make((*numbers, text.rstrip(b"\0").decode()))
        self._stride = self.shape.value_size
        if self.shape.type in PERCPU_TYPES:
            self._stride = (self.shape.value_size + 7) // 8 * 8 * possible_cpus()
        self._key = ctypes.create_string_buffer(max(self.shape.key_size, 4))
        self._value = ctypes.create_string_buffer(self._stride)
        self._element = struct.pack("=I4xQQ", fd, ctypes.addressof(self._key), ctypes.addressof(self._value))

    @classmethod
    def pinned(cls, path: Path) -> "Map":
        """Open a pinned map. Raises NotFound."""
        return cls(_pinned_fd(path, "map"), path.name)

    @classmethod
    def create(
        cls,
        type_: int,
        key_size: int,
        value_size: int,
        max_entries: int,
        flags: int = 0,
        name: str = "",
        inner: "Map | None" = None,
    ) -> "Map":
        """Create a map, which exists until it is closed, unless it is pinned. Raises KernelError.

        The kernel keeps 15 characters of `name`. `inner`: for an array of maps, a map that is the template of
        its entries.
        """
        _unlimit()
        sizes = type_, key_size, value_size, max_entries, flags
        attr = struct.pack("=7I16s", *sizes, inner.fd if inner else 0, 0, name.encode()[:15])
        action = f"cannot create map {name}" if name else f"cannot create a map of type {type_}"
        return cls(bpf(MAP_CREATE, attr, action)[0], name or "unnamed")

    def lookup(self, key: bytes) -> bytes | None:
        """The value of a key. None if there is no such entry.

        For a per-CPU map it is the concatenated values of all possible CPUs, each padded to 8 bytes.
        """
        ctypes.memmove(self._key, key, len(key))
        try:
            bpf(MAP_LOOKUP_ELEM, self._element + bytes(8), f"cannot read map {self.name}")
        except NotFound:
            return None
        return self._value.raw

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None:
        """Write an entry. Raises TableFull if a map without eviction is full."""
        ctypes.memmove(self._key, key, len(key))
        ctypes.memmove(self._value, value, len(value))
        attr = self._element + struct.pack("=Q", flags)
        refills = 0
        while True:
            try:
                bpf(MAP_UPDATE_ELEM, attr, f"cannot write map {self.name}")
                return
            except Rejected as failure:
                refills = _await_refill(failure, refills)

    def delete(self, key: bytes) -> bool:
        """Delete an entry; return whether it existed."""
        ctypes.memmove(self._key, key, len(key))
        try:
            # Without the value's address: fields that the command does not use must be zero.
            bpf(MAP_DELETE_ELEM, self._element[:16], f"cannot delete from map {self.name}")
        except NotFound:
            return False
        return True

    def update_all(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Write many entries, in chunks. If it raises, some of them may have been written."""
        start = refills = 0
        while start < len(entries):
            part = entries[start : start + _CHUNK]
            keys = ctypes.create_string_buffer(b"".join(key for key, _ in part))
            values = ctypes.create_string_buffer(b"".join(value for _, value in part))
            try:
                start += self._batch(MAP_UPDATE_BATCH, 0, 0, keys, values, len(part))
                refills = 0
            except Rejected as failure:
                written = failure.args[1]
                refills = _await_refill(failure, 0 if written else refills)
                start += written

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every entry, in no order."""
        key_size, stride = self.shape.key_size, self._stride
        for keys, values in self.batches(_CHUNK):
            for i in range(len(keys) // key_size):
                yield keys[i * key_size : (i + 1) * key_size], values[i * stride : (i + 1) * stride]

    def batches(self, size: int) -> Iterator[tuple[bytes, bytes]]:
        """Every entry, up to `size` of them at a time, as concatenated keys and concatenated values.

        Two empty strings mean that the kernel found a bucket locked. The next iteration tries it again. One
        call into the kernel continues until the batch is full, and passes empty buckets meanwhile.
        """
        try:
            yield from self._lookup_batches(size)
        except Unsupported:  # this kernel has no batches for this type; nothing was yielded yet
            yield from self._items_one_by_one()

    def _lookup_batches(self, size: int) -> Iterator[tuple[bytes, bytes]]:
        key_size, stride = self.shape.key_size, self._stride
        token = ctypes.create_string_buffer(max(key_size, 8))
        keys = values = ctypes.create_string_buffer(0)
        first, done = True, False
        while not done:
            if len(keys) != key_size * size:
                keys = ctypes.create_string_buffer(key_size * size)
                values = ctypes.create_string_buffer(stride * size)
            start = 0 if first else ctypes.addressof(token)
            try:
                n = self._batch(MAP_LOOKUP_BATCH, start, ctypes.addressof(token), keys, values, size)
            except NotFound as end:
                n, done = end.args[1], True
            except Rejected as stopped:
                if errno_of(stopped) == errno.ENOSPC:  # a hash bucket with more than `size` entries
                    size *= 2
                    continue
                if errno_of(stopped) not in BUSY:
                    raise
                n = stopped.args[1]  # the entries before the locked bucket; the token refers to that bucket
            first = False
            if n or not done:
                yield ctypes.string_at(keys, n * key_size), ctypes.string_at(values, n * stride)

    def _batch(
        self,
        command: int,
        start: int,
        end: int,
        keys: "ctypes.Array[ctypes.c_char]",
        values: "ctypes.Array[ctypes.c_char]",
        n: int,
    ) -> int:
        """The number of entries that were handled. An error has this number as its second argument.

        NotFound is the regular end of a walk. A failed update has handled less than `n` entries. If the
        kernel has no memory to begin, it returns `n` unchanged before Linux 6.8 (06e5c999f102).
        """
        addresses = ctypes.addressof(keys), ctypes.addressof(values)
        attr = struct.pack("=QQQQIIQQ", start, end, *addresses, n, self.fd, 0, 0)
        buffer = ctypes.create_string_buffer(attr, len(attr))
        result = _libc.syscall(syscall_number(), command, buffer, len(attr))
        handled = int(struct.unpack_from("=I", buffer.raw, 32)[0])
        if result < 0:
            number = ctypes.get_errno()
            if command == MAP_UPDATE_BATCH and handled == n:
                handled = 0
            failure = error(number, f"cannot access map {self.name} in batches")
            if number == errno.EINVAL:  # unknown command: a kernel before 5.6
                failure = Unsupported(failure.message)
            failure.args = (failure.message, handled)
            raise failure
        return handled

    def _items_one_by_one(self) -> Iterator[tuple[bytes, bytes]]:
        following = ctypes.create_string_buffer(self.shape.key_size)
        previous = ctypes.create_string_buffer(self.shape.key_size)
        previous_address = 0
        while True:
            attr = struct.pack("=I4xQQQ", self.fd, previous_address, ctypes.addressof(following), 0)
            try:
                bpf(MAP_GET_NEXT_KEY, attr, f"cannot walk map {self.name}")
            except NotFound:
                return
            key = following.raw
            value = self.lookup(key)
            if value is not None:
                yield key, value
            ctypes.memmove(previous, key, len(key))
            previous_address = ctypes.addressof(previous)

    def mapped(self) -> mmap.mmap:
        """The memory of an array with BPF_F_MMAPABLE (5.5, fc9702273e2e). Values are 8-byte aligned.

        All callers in the process share one mapping, since the kernel counts a page in the RSS once for each
        mapping. Each calls `close` once; the last of these calls ends it.
        """
        return self.mapped_with(mmap.PROT_READ | mmap.PROT_WRITE)

    def mapped_with(self, protection: int) -> mmap.mmap:
        """Like `mapped`, with this protection (mmap.PROT_*)."""
        size = (self.shape.value_size + 7) // 8 * 8 * self.shape.max_entries
        pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        key = self.shape.id, protection
        with _Mapping.lock:
            try:
                mapping = _Mapping.shared.get(key) or _Mapping(self.fd, pages, prot=protection)
            except OSError as failure:
                raise error(failure.errno or 0, f"cannot map {self.name} into memory") from failure
            _Mapping.shared[key] = mapping
            mapping.key = key
            mapping.users += 1
        return mapping


class _Mapping(mmap.mmap):
    """The memory of a map, shared by its users."""

    lock = threading.Lock()
    shared: ClassVar[dict[tuple[int, int], "_Mapping"]] = {}
    key = 0, 0
    """The id of the map, and the protection."""
    users = 0

    def __exit__(self, *_: object) -> None:
        self.close()  # mmap's own calls its own close()

    def close(self) -> None:
        """End the mapping with its last user. Raises BufferError if that user has not released its views."""
        with self.lock:
            if self.users == 1:
                super().close()
                del self.shared[self.key]
            self.users -= 1


class Program(_Object):
    """A loaded program."""

    @classmethod
    def pinned(cls, path: Path) -> "Program":
        """Open a pinned program. Raises NotFound."""
        return cls(_pinned_fd(path, "prog"), path.name)

    @classmethod
    def load(
        cls,
        type_: int,
        attach_type: int,
        instructions: bytes,
        name: str = "ebpfproxy_probe",
        license_: str = "Dual BSD/GPL",
        log: "ctypes.Array[ctypes.c_char] | None" = None,
        log_level: int = 0,
        flags: int = 0,
    ) -> "Program":
        """Load instructions (struct bpf_insn), which refer to a map by its file descriptor. Raises
        KernelError.

        The kernel keeps 15 characters of `name`. `log`: a buffer for the verifier's log, which has the detail
        of `log_level` (BPF_LOG_*). `flags`: BPF_F_* of BPF_PROG_LOAD.
        """
        _unlimit()
        code = ctypes.create_string_buffer(instructions, len(instructions))
        terms = ctypes.create_string_buffer(license_.encode())
        logged = (log_level, len(log), ctypes.addressof(log)) if log else (0, 0, 0)
        attr = struct.pack(
            "=IIQQIIQII16sII",
            *(type_, len(instructions) // 8, ctypes.addressof(code), ctypes.addressof(terms)),
            *(*logged, 0, flags, name.encode()[:15], 0, attach_type),
        )
        for attempt in range(_ATTEMPTS):
            try:
                return cls(bpf(PROG_LOAD, attr, f"cannot load program {name}")[0], name)
            except KernelError as failure:
                if errno_of(failure) != errno.EAGAIN or attempt == _ATTEMPTS - 1:
                    raise  # EAGAIN: a signal interrupted the verifier, at the last attempt, too
        raise AssertionError("unreachable")

    @classmethod
    def by_id(cls, number: int) -> "Program":
        """Any program of this machine. Raises NotFound if it does not exist, Rejected without
        CAP_SYS_ADMIN."""
        fd, _ = bpf(PROG_GET_FD_BY_ID, struct.pack("=III", number, 0, 0), f"cannot open program {number}")
        return cls(fd, f"program {number}")

    @property
    def id(self) -> int:
        return int(struct.unpack_from("=II", self.facts(16))[1])

    @property
    def called(self) -> str:
        """The name that it was loaded with: up to 15 characters, "" if it has none."""
        return self.facts(80)[64:80].partition(b"\0")[0].decode(errors="replace")


class Link(_Object):
    """A bpf_link: an attachment that exists as long as it is open or pinned."""

    @classmethod
    def pinned(cls, path: Path) -> "Link":
        """Open a pinned link. Raises NotFound."""
        return cls(_pinned_fd(path, "link"), path.name)

    @classmethod
    @contextlib.contextmanager
    def pinned_if_any(cls, path: Path) -> Iterator["Link | None"]:
        """Open a pinned link, and close it at the end of the `with` block. None if there is none."""
        try:
            link = cls.pinned(path)
        except NotFound:
            yield None
            return
        with contextlib.closing(link):
            yield link

    @classmethod
    def create(cls, program: Program, target_fd: int, attach_type: int) -> "Link":
        """Create a cgroup link. Raises Unsupported before Linux 5.7 (af6eea57437a)."""
        attr = struct.pack("=IIII", program.fd, target_fd, attach_type, 0)
        try:
            return cls(bpf(LINK_CREATE, attr, f"cannot attach {program.name}")[0], program.name)
        except Rejected as failure:
            if errno_of(failure) == errno.EINVAL:
                raise Unsupported(failure.message) from failure
            raise

    @classmethod
    def create_first(cls, program: Program, ifindex: int, attach_type: int) -> "Link":
        """Create a tcx link (BPF_TCX_INGRESS, BPF_TCX_EGRESS) at the head of the device's list (Linux 6.6).

        BPF_F_BEFORE without another program selects the head: e420bed02507 ("bpf: Add fd-based tcx multi-prog
        infra with link support", 6.6). The device is one of the calling thread's network namespace.

        Raises AlreadyExists if the same program is in the list already, Rejected (ENODEV) if the device does
        not exist.
        """
        attr = struct.pack("=IIIIIIQ", program.fd, ifindex, attach_type, _BEFORE, 0, 0, 0)
        return cls(bpf(LINK_CREATE, attr, f"cannot attach {program.name}")[0], program.name)

    @classmethod
    def create_xdp(cls, program: Program, ifindex: int, flags: int) -> "Link":
        """Create an XDP link (Linux 5.9, aa8d3a716b59). `flags`: XDP_FLAGS_*_MODE.

        Raises Rejected: EBUSY or EEXIST if the device has another program, EOPNOTSUPP as Unsupported if the
        driver lacks the mode, EINVAL if the device does not exist or the kernel has no XDP links.
        """
        attr = struct.pack("=IIII", program.fd, ifindex, _XDP_ATTACH_TYPE, flags)
        return cls(bpf(LINK_CREATE, attr, f"cannot attach {program.name}")[0], program.name)

    @property
    def id(self) -> int:
        return int(struct.unpack_from("=II", self.facts(32))[1])

    @property
    def program_id(self) -> int:
        return int(struct.unpack_from("=III", self.facts(32))[2])

    @property
    def ifindex(self) -> int:
        """The device of a tcx or XDP link, in the device's network namespace. 0 if the device is gone."""
        return int(struct.unpack_from("=I", self.facts(32), 16)[0])

    def detach(self) -> None:
        """Detach at once, although the link stays open or pinned. No error if it is detached already."""
        bpf(LINK_DETACH, struct.pack("=I", self.fd), f"cannot detach {self.name}")

    @property
    def cgroup_id(self) -> int:
        """The inode number of the cgroup. 0 if the cgroup is gone."""
        return int(struct.unpack_from("=Q", self.facts(32), 16)[0])

    def replace(self, program: Program) -> None:
        """Replace the program between two packets.

        Raises Rejected (ENOLINK) if the cgroup or device is gone.
        """
        attr = struct.pack("=IIII", self.fd, program.fd, 0, 0)
        bpf(LINK_UPDATE, attr, f"cannot replace the program of {self.name}")


def loads(program_type: int, attach_type: int, instructions: bytes, flags: int = 0) -> bool:
    """Whether the kernel loads a program of these instructions (struct bpf_insn). For probing features.

    `flags`: as for `Program.load`. Raises the same errors as `rejection`.
    """
    return not rejection(program_type, attach_type, instructions, flags)


def rejection(program_type: int, attach_type: int, instructions: bytes, flags: int = 0) -> int:
    """The errno with which the kernel rejects a program of these instructions. 0 if it loads it.

    Raises Rejected if loading programs is not permitted, or if memory or file descriptors are missing. Such
    errors do not depend on the program.
    """
    try:
        Program.load(program_type, attach_type, instructions, flags=flags).close()
    except KernelError as failure:
        if errno_of(failure) in _NOT_NOW:
            raise
        return errno_of(failure)
    return 0


def possible_cpus() -> int:
    """The number of values in a per-CPU map, from /sys/devices/system/cpu/possible, for example "0-3,8"."""
    text = Path("/sys/devices/system/cpu/possible").read_text().strip()
    return 1 + max(int(part.split("-")[-1]) for part in text.split(","))
