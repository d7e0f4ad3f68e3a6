"""The initial file system of a VM: busybox, the modules to mount the root file system, and `guest/init`."""

import lzma
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.vm.cache import Installed, Unavailable

_INIT = Path(__file__).parent / "guest" / "init"
_WANTED_IN_A_VM = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
_WANTED_IN_USER_MODE = ("hostfs", "overlay")


def initramfs(kernel: Installed) -> bytes:
    """An archive in the kernel's format (Documentation/driver-api/early-userspace/buffer-format.rst).

    Raises Unavailable without busybox, or without one of the modules.
    """
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Unavailable("no program busybox: apt-get install busybox-static")
    parts = [_entry(name, 0o040755) for name in ("bin", "dev", "proc", "modules", "root", "below", "above")]
    parts.append(_entry("bin/busybox", 0o100755, Path(busybox).read_bytes()))
    parts.append(_entry("bin/sh", 0o120777, b"busybox"))
    parts.append(_entry("init", 0o100755, _INIT.read_bytes()))
    for number, module in enumerate(_in_order(kernel)):
        parts.append(_entry(f"modules/{number:03}.ko", 0o100644, _plain(module)))
    return b"".join([*parts, _entry("TRAILER!!!", 0)])


def _entry(name: str, mode: int, body: bytes = b"") -> bytes:
    fields = (0, mode, 0, 0, 1, 0, len(body), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(body)


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % 4)


def _in_order(kernel: Installed) -> Iterator[Path]:
    """The files of the needed modules that are not built in, each after its dependencies."""
    needs, named = {}, {}
    for line in (kernel.modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
        named[Path(path).name.partition(".")[0]] = path
    built_in = (kernel.modules / "modules.builtin").read_text()
    given = set()
    for name in _WANTED_IN_USER_MODE if kernel.user_mode else _WANTED_IN_A_VM:
        if name not in named:
            if f"/{name}.ko" in built_in:
                continue
            raise Unavailable(f"kernel {kernel.release} has no module {name}")
        for path in (*reversed(needs[named[name]]), named[name]):
            if path not in given:
                given.add(path)
                yield kernel.modules / path


def _plain(module: Path) -> bytes:
    body = module.read_bytes()
    return lzma.decompress(body) if module.suffix == ".xz" else body
