"""The backends that the contract tests run with: the fake one and each real one."""

import contextlib
import itertools
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf.backend import EbpfBackend, EbpfSettings
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.backends.ebpf.services import shares
from ebpfproxy.backends.interface import Backend
from ebpfproxy.backends.iptables.backend import IptablesBackend
from ebpfproxy.backends.iptables.rules import IptablesSettings
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.entries import IpvsSettings
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.backends.userspace.backend import UserspaceBackend
from ebpfproxy.backends.userspace.entries import UserspaceSettings
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.bpf import tc, tcx
from ebpfproxy.linux.bpf.bpf import Link, bpf
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.netns import netns
from ebpfproxy.plan.service_plan import NodePlan
from tests.support.bpf_place import BpfPlace, bpf_place
from tests.support.clock import Clock
from tests.support.fake_backend import FakeBackend, FakeKernel

_LINK_GET_FD_BY_ID = 30  # BPF_LINK_GET_FD_BY_ID

ROOM = 8
"""The number of frontends of one namespace that fit in the backends of these tests."""


class Devices(Protocol):
    """The network devices that a backend finds."""

    def add(self, name: str) -> int:
        """Create a device; its ifindex, which is never reused."""

    def remove(self, name: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def strip(self, name: str) -> None:
        """Remove the backend's programs from a device, as another program might."""


class FakeDevices:
    def __init__(self, kernel: FakeKernel) -> None:
        self._kernel = kernel
        self._numbers = itertools.count(2)

    def add(self, name: str) -> int:
        ifindex = next(self._numbers)
        self._kernel.devices[ifindex] = name
        return ifindex

    def remove(self, name: str) -> None:
        ifindex = self._index(name)
        del self._kernel.devices[ifindex]
        self._kernel.watched.pop(ifindex, None)

    def rename(self, old: str, new: str) -> None:
        self._kernel.devices[self._index(old)] = new

    def strip(self, name: str) -> None:
        self._kernel.watched.pop(self._index(name), None)

    def _index(self, name: str) -> int:
        return next(ifindex for ifindex, each in self._kernel.devices.items() if each == name)


class RealDevices:
    """Each device is one end of a veth pair in the test's network namespace."""

    def add(self, name: str) -> int:
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}-peer")
        return socket.if_nametoindex(name)

    def remove(self, name: str) -> None:
        _run("ip", "link", "del", name)

    def rename(self, old: str, new: str) -> None:
        _run("ip", "link", "set", old, "name", new)

    def strip(self, name: str) -> None:
        ifindex = socket.if_nametoindex(name)
        if tc.has_clsact(ifindex):
            _run("tc", "qdisc", "del", "dev", name, "clsact")
        for side in Side if tcx.is_supported() else ():
            for placed in tcx.programs(ifindex, side):
                fd, _ = bpf(_LINK_GET_FD_BY_ID, struct.pack("=I", placed.link_id), "cannot open the link")
                with contextlib.closing(Link(fd, name)) as link:
                    link.detach()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


class Subject:
    """A backend and its devices; `reopen` opens it again as a restarted agent would."""

    def __init__(self, make: Callable[[Clock], Backend[Any, Any]], devices: Devices) -> None:
        self._make = make
        self.devices = devices
        self.clock = Clock()
        self.plane = make(self.clock)
        self.plane.open()

    def reopen(self) -> None:
        self.plane.close()
        self.plane = self._make(self.clock)
        self.plane.open()


@pytest.fixture(scope="session")
def _ebpf_place() -> Iterator[BpfPlace]:
    with bpf_place() as place:
        yield place


@pytest.fixture
def _namespace() -> Iterator[None]:
    """The test is in a new network namespace with only a loopback device."""
    name = f"ebpfproxy-contract-{os.getpid()}"
    netns.create(name)
    try:
        with netns.entered(netns.path(name)):
            yield
    finally:
        netns.delete(name)


BACKENDS = ("fake", "ebpf", "iptables-legacy", "iptables-nft", "nftables", "ipvs", "userspace")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "backends(*names): the backends that a test runs with; default: all")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("backends")
        real = [name for name in (mark.args if mark else BACKENDS) if name != "fake"]
        names = ["fake", *(pytest.param(name, marks=pytest.mark.kernel) for name in real)]
        metafunc.parametrize("subject", names, indirect=True)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """An open backend with the entries of an empty node. The eBPF backend keeps its compiled programs between
    tests."""
    make: Callable[[Clock], Backend[Any, Any]]
    devices: Devices
    if request.param == "fake":
        kernel = FakeKernel(capacity=ROOM)
        devices = FakeDevices(kernel)
        make = lambda clock: FakeBackend(kernel)  # noqa: E731
    elif request.param.startswith("iptables-"):
        request.getfixturevalue("_namespace")
        devices = RealDevices()
        tool_backend = request.param.removeprefix("iptables-")
        make = lambda clock: IptablesBackend(IptablesSettings(), tool_backend)  # noqa: E731
    elif request.param == "ipvs":
        request.getfixturevalue("_namespace")
        devices = RealDevices()
        try:
            ipvs.available()
        except Unsupported as unsupported:
            pytest.skip(unsupported.message)
        _run("ip", "link", "set", "lo", "up")  # without any route, IPVS rejects all endpoints
        make = lambda clock: IpvsBackend(IpvsSettings())  # noqa: E731
    elif request.param == "userspace":
        request.getfixturevalue("_namespace")
        devices = RealDevices()
        _run("ip", "link", "set", "lo", "up")
        make = lambda clock: UserspaceBackend(UserspaceSettings(relays=2))  # noqa: E731
    elif request.param == "nftables":
        request.getfixturevalue("_namespace")
        devices = RealDevices()
        make = lambda clock: NftablesBackend(NftablesSettings(), clock)  # noqa: E731
    else:
        place: BpfPlace = request.getfixturevalue("_ebpf_place")
        request.getfixturevalue("_namespace")
        devices = RealDevices()
        sizes = MapSizes(ROOM + ROOM // shares.FACTOR, 64, 64, 16, 16, flows=16, source_ranges=16)
        settings = EbpfSettings(place.cgroup, place.bpffs, sizes=sizes)
        make = lambda clock: EbpfBackend(settings, clock=clock)  # noqa: E731
    created = Subject(make, devices)
    try:
        node = created.plane.render((), NodePlan())
        assert not created.plane.apply(diff(created.plane.read(), node))
        assert created.plane.read() == node
        yield created
    finally:
        created.plane.close()
