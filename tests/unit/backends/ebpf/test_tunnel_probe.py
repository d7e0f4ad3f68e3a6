"""Whether a node can have direct server return: Geneve, and a free UDP port."""

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf import probes
from ebpfproxy.backends.ebpf.mode import NO_TUNNELS, _with_available
from ebpfproxy.config import Config
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.netlink import geneve


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["v4", "v6"])
def taken(request: pytest.FixtureRequest) -> Iterator[int]:
    """A UDP port that another program has, in one family."""
    with socket.socket(request.param, socket.SOCK_DGRAM) as other:
        if request.param == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind(("", 0))
        yield other.getsockname()[1]


@pytest.fixture
def with_geneve(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Not every kernel of tests has Geneve."""
    monkeypatch.setattr(probes, "_create_tunnel", lambda port: None)
    monkeypatch.setattr(geneve, "_find", lambda: None)
    return monkeypatch


def free_port() -> int:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as unused:
        unused.bind(("", 0))
        number: int = unused.getsockname()[1]
        return number


def config(port: int, tmp_path: Path) -> Config:
    return Config.parse({"ebpf_dsr_port": str(port), "bpffs_root": str(tmp_path)})


def test_a_free_port_is_found(with_geneve: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = free_port()
    assert probes.tunnels(port).present
    assert _with_available(config(port, tmp_path), report=True).ebpf_dsr_port == port


@pytest.mark.usefixtures("with_geneve")
def test_a_port_of_another_program_is_named(
    taken: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = probes.tunnels(taken)
    assert (found.failure, found.needed) == (errno.EADDRINUSE, False)
    assert found.missing.startswith(f"UDP port {taken} is in use")
    assert _with_available(config(taken, tmp_path), report=False).ebpf_dsr_port == 0
    assert not caplog.records
    assert _with_available(config(taken, tmp_path), report=True).ebpf_dsr_port == 0
    assert [each.message for each in caplog.records] == [NO_TUNNELS]


def test_the_agents_own_device_has_the_port(with_geneve: pytest.MonkeyPatch, taken: int) -> None:
    with_geneve.setattr(geneve, "_find", lambda: geneve._Device(7, "geneve", True, taken, True))
    assert probes.tunnels(taken).present


def test_the_port_is_tried_if_the_agents_own_device_has_another_one(
    with_geneve: pytest.MonkeyPatch, taken: int
) -> None:
    """The device is about to be replaced, which would fail."""
    with_geneve.setattr(geneve, "_find", lambda: geneve._Device(7, "geneve", True, free_port(), True))
    assert probes.tunnels(taken).failure == errno.EADDRINUSE


def test_a_kernel_without_geneve_is_reported_with_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(port: int) -> None:
        raise Unsupported("no devices of kind geneve", "modprobe geneve") from OSError(errno.EOPNOTSUPP, "")

    monkeypatch.setattr(probes, "_create_tunnel", unsupported)
    found = probes.tunnels(6083)
    assert (found.failure, found.modules, found.remedy) == (errno.EOPNOTSUPP, ("geneve",), "modprobe geneve")
