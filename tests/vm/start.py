"""The command lines that boot a kernel: in QEMU, or as a program of this machine."""

import os
import resource
import shutil
from pathlib import Path

from tests.vm.acceleration import ENDS_WITH_ITS_PARENT, QEMU, Accelerator
from tests.vm.cache import Installed

_QEMU_APPEND = (
    "console=ttyS0 loglevel=4 oops=panic panic=-1 mitigations=off audit=0 apparmor=0 selinux=0 nokaslr "
    "no_timer_check cryptomgr.notests random.trust_cpu=on net.ifnames=0 8250.nr_uarts=1 nowatchdog"
)
_USER_MODE_APPEND = (
    "loglevel=4 oops=panic panic=-1 noreboot seccomp=on con=null con0=null,fd:1 "
    # Tunnels are built in, and would add a device such as tunl0 to each network namespace.
    "fb_tunnels=none "
    # 262,144 tracked connections at most, independent of the memory.
    "nf_conntrack.hashsize=32768"
)
_MEMORY = Path("/dev/shm")


def start_command(
    kernel: Installed, accelerator: Accelerator, own: Path, cpus: int, memory_mib: int
) -> list[str]:
    """The command that boots the kernel with the files in `own`, whose parent is the machine's $SCRATCH.

    It writes messages to its standard output and error, and a VM's kernel writes them to `own`/console.
    All its processes end when the command is killed.
    """
    if accelerator is Accelerator.NONE:
        return _user_mode(kernel, own, cpus, memory_mib)
    return _qemu(kernel, accelerator, own, cpus, memory_mib)


def _qemu(kernel: Installed, accelerator: Accelerator, own: Path, cpus: int, memory_mib: int) -> list[str]:
    return [
        *ENDS_WITH_ITS_PARENT,
        *(QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *accelerator.options,
        *("-smp", str(cpus), "-m", f"{memory_mib}M"),
        *("-kernel", str(kernel.image), "-initrd", str(own / "initramfs"), "-append", _QEMU_APPEND),
        *("-serial", f"file:{own / 'console'}"),
        *_shared("machine", "/", ",readonly=on"),
        *_shared("scratch", str(own.parent)),
    ]


def _shared(tag: str, path: str, extra: str = "") -> list[str]:
    storage = f"local,id={tag},path={path},security_model=none,multidevs=remap{extra}"
    return ["-fsdev", storage, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]


def _user_mode(kernel: Installed, own: Path, cpus: int, memory_mib: int) -> list[str]:
    return [
        *ENDS_WITH_ITS_PARENT,
        # Each process of the guest is one on this machine. They are in a PID namespace, which ends with its
        # first process. That one is a shell: after a panic the kernel calls abort(), which does not end the
        # first process of a namespace.
        *("unshare", "--pid", "--fork", "--kill-child", "--", "sh", "-c", '"$@"; exit $?', "user-mode"),
        # hostfs keeps a file open while the guest has its inode. A panic would write the memory as core file.
        *("prlimit", f"--nofile={resource.getrlimit(resource.RLIMIT_NOFILE)[1]}", "--core=0", "--"),
        *("env", f"TMPDIR={_memory(own, memory_mib)}"),
        *(str(kernel.program), f"mem={memory_mib}M", f"ncpus={cpus}", *_USER_MODE_APPEND.split()),
        *(f"initrd={own / 'initramfs'}", f"uml_dir={own}/", "umid=user-mode"),
        # The kernel passes words that it does not recognize to the first process, as environment.
        f"hostfs_scratch={own.parent}",
    ]


def _memory(own: Path, memory_mib: int) -> Path:
    """The folder for the deleted file that is the guest's memory."""
    free_mib = shutil.disk_usage(_MEMORY).free >> 20 if _MEMORY.is_dir() else 0
    return _MEMORY if free_mib > memory_mib and os.access(_MEMORY, os.W_OK) else own
