"""Sockets of another process: finding their holder, and connect() on a duplicated descriptor."""

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import NotFound, Rejected
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.sockets import duplicates, holders, sockets
from ebpfproxy.linux.sockets.sockets import DiagSocket
from ebpfproxy.model.address import Family, loopback

pytestmark = pytest.mark.kernel

V4 = loopback(Family.IPV4)
NO_PROCESS = (1 << 22) + 1  # above what kernel.pid_max may be
CHILD = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect(("127.0.0.1", int(sys.argv[1])))
print(sock.fileno(), flush=True)
for _ in sys.stdin:
    try:
        print(sock.getpeername()[1], sock.getsockname()[1], flush=True)
    except OSError:
        print(0, sock.getsockname()[1], flush=True)
"""


class Child:
    """A process with a UDP socket that is connected to a server of the test."""

    def __init__(self, process: "subprocess.Popen[str]", server: socket.socket) -> None:
        self.process = process
        self.server = server
        self.fd = int(self.line())
        port = server.getsockname()[1]
        (self.found,) = (each for each in sockets.connected_udp([(V4, port)]) if each.inode == self.inode)

    @property
    def inode(self) -> int:
        return os.stat(f"/proc/{self.process.pid}/fd/{self.fd}").st_ino  # noqa: PTH116

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def ports(self) -> tuple[int, int]:
        """The peer's port, 0 for none, and the local one, as the process sees them."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        peer, local = map(int, self.line().split())
        return peer, local

    @contextlib.contextmanager
    def duplicated(self, found: DiagSocket | None = None) -> Iterator[socket.socket]:
        process = duplicates.open_process(self.process.pid)
        try:
            with duplicates.duplicated(process, self.fd, found or self.found) as sock:
                yield sock
        finally:
            duplicates.close(process)


def server() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    return made


@pytest.fixture
def child() -> Iterator[Child]:
    with server() as one:
        command = [sys.executable, "-c", CHILD, str(one.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Child(process, one)
            finally:
                process.kill()


def test_the_holder_is_found_by_the_sockets_inode(child: Child) -> None:
    near = namespaces.identity_of("/proc/self/ns/net")
    assert near
    held = [each for (each,) in holders.holders("/proc", {child.inode}, {near})]
    assert held == [(child.process.pid, child.fd, child.inode)]
    assert [each for (each,) in holders.holders("/proc", {child.inode}, ())] == held, (
        "for a process in another network namespace"
    )


def test_the_walk_ends_once_all_sockets_are_found(child: Child) -> None:
    wanted = {child.inode, 1}
    walk = holders.holders("/proc", wanted, ())
    assert next(walk)[0].inode == child.inode
    wanted.clear()
    assert list(walk) == []


def test_connecting_a_duplicate_changes_the_peer_and_keeps_the_port(child: Child) -> None:
    _, local = child.ports()
    with server() as other, child.duplicated() as sock:
        port = other.getsockname()[1]
        duplicates.connect(sock, V4, port)
        assert duplicates.peer(sock) == (V4, port)
        assert child.ports() == (port, local)
        sock.send(b"?")
        assert select.select([other], [], [], 5)[0]
        assert other.recvfrom(10) == (b"?", ("127.0.0.1", local))


def test_the_source_address_can_be_reselected_and_the_port_is_kept(child: Child) -> None:
    _, local = child.ports()
    with child.duplicated() as sock:
        duplicates.choose_source_again(sock)
        assert duplicates.peer(sock) is None
        assert sock.getsockname() == ("0.0.0.0", local)
        duplicates.connect(sock, V4, 9)
        assert child.ports() == (9, local)


def test_a_failed_connect_keeps_the_peer(child: Child) -> None:
    before = child.ports()
    nowhere = loopback(Family.IPV4)[:12] + bytes((255, 255, 255, 255))
    with (
        child.duplicated() as sock,
        pytest.raises(Rejected, match=r"cannot connect to 255\.255\.255\.255:9: "),
    ):
        duplicates.connect(sock, type(V4)(nowhere), 9)
    assert child.ports() == before


def test_a_descriptor_with_another_socket_is_not_used(child: Child) -> None:
    with pytest.raises(NotFound), child.duplicated(child.found._replace(cookie=child.found.cookie + 1)):
        pass
    fd, child.fd = child.fd, 0  # its standard input, a pipe
    with pytest.raises(NotFound), child.duplicated():
        pass
    child.fd = fd


def test_a_missing_descriptor_or_process_raises_not_found(child: Child) -> None:
    child.fd = 999
    with pytest.raises(NotFound), child.duplicated():
        pass
    with pytest.raises(NotFound):
        duplicates.open_process(NO_PROCESS)


def test_the_pidfd_system_calls_work_and_leak_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    duplicates.try_out()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_without_sys_ptrace_the_hint_names_the_capability(child: Child) -> None:
    code = (
        "import sys\nfrom ebpfproxy.linux.sockets import duplicates\n"
        "from ebpfproxy.errors import Unsupported\n"
        "process = duplicates.open_process(int(sys.argv[1]))\n"
        "try:\n    duplicates.duplicate(process, int(sys.argv[2]))\n"
        "except Unsupported as failure:\n    print(failure.hint)\n"
    )
    drop = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", sys.executable, "-c", code]
    done = subprocess.run(
        [*drop, str(child.process.pid), str(child.fd)], capture_output=True, text=True, check=True
    )
    assert "CAP_SYS_PTRACE" in done.stdout
