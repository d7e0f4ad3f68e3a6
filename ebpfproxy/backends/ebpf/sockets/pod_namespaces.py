"""A thread that watches the network namespaces that may be those of pods, and their connections of the packet
path.

A pod that starts uses the packet path. Once the map `pod_namespaces` has its namespace, new sockets use the
socket path. Connections of the packet path continue there: until they end, the pod's device keeps its
programs.
"""

import contextlib
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from socket import htons

from ebpfproxy import threads
from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.sockets import netns_cookie
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netlink import links
from ebpfproxy.linux.netns import namespaces, survey
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.sockets import DiagSocket
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, family, unspecified
from ebpfproxy.model.namespace import Namespace

log = Logger(__name__)

SURVEY_FAILED = "Cannot read the network namespaces, retrying"
"""New pods use the packet path until the namespaces can be read. Running pods stay on their path."""

_POLL = 1.0  # seconds between looks for new devices: a pod that starts has one
_INTERVAL = 10.0  # seconds between surveys, for changes in a namespace
_RETRIES = 0.5, 1.0, 2.0, 4.0  # seconds after a device was first seen: meanwhile its pod is set up
_REST_FACTOR = 9  # surveys take at most a tenth of a CPU
_PATIENCE = 5.0  # seconds that `close` waits
_COOKIE, _IFINDEX = struct.Struct("=Q"), struct.Struct("=I")
_ADDRESS_BYTES = 16  # the source, at the start of struct flow_key
_MAPS = "pod_namespaces", "devices", "flows", "services"


def read(proc_root: Path, cgroup_root: Path | None) -> tuple[Namespace, ...]:
    """The namespaces, sorted by cookie. Raises KernelError."""
    return survey.survey(proc_root, lambda: netns_cookie.own(cgroup_root))


def _devices(known: dict[int, str]) -> dict[int, str]:
    """The names of the node's devices by ifindex; `known` if they are unreadable, as the survey reports."""
    try:
        return links.names()
    except KernelError:
        return known


class PodNamespaces:
    """Reports the namespaces to `changed`: in the constructor, and in a thread whenever they change.

    Raises NotFound if the maps are not in `maps`.
    """

    def __init__(
        self,
        maps: Path,
        proc_root: Path,
        cgroup_root: Path,
        changed: Callable[[tuple[Namespace, ...]], object],
    ) -> None:
        self._maps = {name: Map.pinned(maps / name) for name in _MAPS}
        self._proc_root = proc_root
        self._cgroup_root = cgroup_root
        self._changed = changed
        self._reported: tuple[Namespace, ...] | None = None
        self._devices: dict[int, str] = _devices({})
        self._due = [time.monotonic() + _INTERVAL]
        self._stop = threading.Event()
        self._survey()
        self._thread = threading.Thread(target=self._run, name="pod-namespaces", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. It waits at most 5 s."""
        self._stop.set()
        if not threads.join(self._thread, _PATIENCE):
            return  # it reads the maps: they stay open until the process ends
        for opened in self._maps.values():
            opened.close()

    def _run(self) -> None:
        while not self._stop.wait(_POLL):
            now = time.monotonic()
            if self._has_new_device():
                self._due = sorted({now, *(now + each for each in _RETRIES), *self._due})
            if self._due[0] > now:
                continue
            self._survey()
            done = time.monotonic()
            rest = done + _REST_FACTOR * (done - now)
            self._due = [each for each in self._due if each > rest] or [max(rest, done + _INTERVAL)]

    def _has_new_device(self) -> bool:
        previous, self._devices = self._devices, _devices(self._devices)
        return not self._devices.items() <= previous.items()

    def _survey(self) -> None:
        """Report the namespaces if they have changed; log every error, since the thread must continue."""
        try:
            # First the map: connections of the packet path may begin as long as it lacks a namespace.
            on_socket_path = {_COOKIE.unpack(key)[0] for key, _ in self._maps["pod_namespaces"].items()}
            found = read(self._proc_root, self._cgroup_root)
            idle = self._idle([each for each in found if each.cookie in on_socket_path])
            reported = tuple(each._replace(in_flight=each.cookie not in idle) for each in found)
        except KernelError as failure:
            log.error(SURVEY_FAILED, reason=failure.message, hint=failure.hint)
            return
        except Exception as failure:
            log.error(SURVEY_FAILED, reason=repr(failure))
            return
        if reported != self._reported:
            self._changed(reported)
            self._reported = reported

    def _idle(self, namespaces_: list[Namespace]) -> set[int]:
        """The cookies of the namespaces without connections that the packet path translates at their devices.

        Such a connection has a flow. A connected UDP socket may have none at the moment. Raises KernelError.
        """
        translated = [each for each in namespaces_ if any(map(self._has_programs, each.outer))]
        idle = {each.cookie for each in namespaces_} - {each.cookie for each in translated}
        if not translated:
            return idle
        clients = {Address(key[:_ADDRESS_BYTES]) for key, _ in self._maps["flows"].items()}
        quiet = {each.cookie for each in translated if not clients & each.addresses}
        with contextlib.closing(namespaces.opened_network_namespaces(str(self._proc_root))) as descriptors:
            for descriptor in descriptors if quiet else ():
                with contextlib.suppress(NotFound, OSError), namespaces.in_namespace(descriptor):
                    cookie = netns_cookie.own(self._cgroup_root)
                    if cookie in quiet and not any(map(self._is_to_frontend, sockets.connected_udp())):
                        idle.add(cookie)
        return idle

    def _has_programs(self, ifindex: int) -> bool:
        return self._maps["devices"].lookup(_IFINDEX.pack(ifindex)) is not None

    def _is_to_frontend(self, found: DiagSocket) -> bool:
        """Whether the socket has a frontend as its peer. A NodePort counts at every address."""
        services, port = self._maps["services"], htons(found.destination_port)
        addresses = found.destination, unspecified(family(found.destination))
        keys = (abi.SERVICE_KEY.pack(each, port, found.protocol, 0) for each in addresses)
        return any(services.lookup(key) for key in keys)
