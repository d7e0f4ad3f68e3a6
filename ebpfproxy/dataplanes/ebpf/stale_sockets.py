"""Connected UDP sockets whose endpoint is gone, in all network namespaces of the node: they are destroyed.

Such a socket would send to a dead address for as long as its process lives (cilium #12859, #48096).
Which socket is stale is read from the kernel's own state, never from a history of events: it is
connected to a place where a Service sent it (socket_peers), and the endpoint that it was sent to is
in force no more (endpoints). The search is repeated until it finds none, so a kill that failed shows.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from socket import htons

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.kernel import namespaces, sockets
from ebpfproxy.kernel.bpf import Map
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, format_endpoint

log = Logger(__name__)

Places = frozenset[tuple[Address, int]]

_ATTEMPTS = 3
_PATIENCE = 5.0  # seconds that an agent's end waits for the search


class StaleSockets:
    """A thread of its own, since it moves from namespace to namespace, and must not hold up a sync.

    `counted` is called in that thread with how many sockets were destroyed, and how many withstood.
    """

    def __init__(self, maps: Path, proc_root: Path, counted: Callable[[int, int], object]) -> None:
        self._maps = [Map.pinned(maps / name) for name in ("socket_peers", "endpoints")]
        self._peers, self._endpoints = (opened.mapped() for opened in self._maps)
        self._places = self._maps[0].shape.max_entries
        self._proc_root = str(proc_root)
        self._counted = counted
        self._jobs: queue.SimpleQueue[Places | type[StopIteration] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stale-sockets", daemon=True)
        self._thread.start()

    def look(self, places: Places | None) -> None:
        """Look for stale sockets connected to these places, or to any; soon, in the thread."""
        self._jobs.put(places)

    def close(self) -> None:
        """Finish what was asked for, and end. Where that takes longer than 5 s, it is not waited for."""
        self._jobs.put(StopIteration)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():  # it reads the maps: they stay open until the process ends
            log.warning("stale sockets are still being looked for; not waiting", seconds=_PATIENCE)
            return
        self._endpoints.close()
        self._peers.close()
        for opened in self._maps:
            opened.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not StopIteration:
            assert job is None or isinstance(job, frozenset)
            try:
                self._destroy_all(job)
            except KernelError as failure:
                log.error("stale sockets could not be looked for", reason=failure.message)
            except Exception as failure:  # the thread lives on: nobody else looks for later ones
                log.error("stale sockets could not be looked for", reason=repr(failure))

    def _destroy_all(self, places: Places | None) -> None:
        destroyed = failed = 0
        for _ in range(_ATTEMPTS):
            ended, withstood = self._pass(places)
            destroyed += ended
            failed = withstood
            if not ended and not withstood:
                break
        if destroyed or failed:
            self._counted(destroyed, failed)
            log.info("destroyed stale sockets", destroyed=destroyed, failed=failed)

    def _pass(self, places: Places | None) -> tuple[int, int]:
        """One search through every namespace: how many were destroyed, how many could not be."""
        ended = withstood = 0
        with contextlib.closing(namespaces.opened_network_namespaces(self._proc_root)) as descriptors:
            for descriptor in descriptors:
                with namespaces.in_namespace(descriptor):
                    for found in sockets.connected_udp(places):
                        if not self._is_stale(found):
                            continue
                        try:
                            sockets.destroy(found)
                            ended += 1
                        except NotFound:
                            pass  # closed by its process meanwhile
                        except KernelError as failure:
                            withstood += 1
                            peer = format_endpoint(found.destination, found.destination_port)
                            log.debug("a stale socket withstood", peer=peer, reason=failure.message)
        return ended, withstood

    def _is_stale(self, found: sockets.DiagSocket) -> bool:
        place = found.destination, htons(found.destination_port)
        sent = self._sent(found.cookie)
        if sent is None or sent[:2] != place:
            return False  # no Service sent it there
        *_, service, id_ = sent
        if (id_ + 1) * abi.ENDPOINT.size > len(self._endpoints):
            return False
        address, port, flags, owner = abi.ENDPOINT.unpack_from(self._endpoints, id_ * abi.ENDPOINT.size)
        in_force = flags & abi.ENDPOINT_LISTED and owner == service
        return not (in_force and (address, port) == place)

    def _sent(self, cookie: int) -> tuple[Address, int, int, int] | None:
        """Where a Service sent a socket: address, port in network order, the ids of service and endpoint."""
        for way in range(abi.SOCKET_WAYS):
            at = (cookie + way) % self._places * abi.SOCKET_PEER.size
            owner, address, port, _, _, service, *_, id_, _ = abi.SOCKET_PEER.unpack_from(self._peers, at)
            if owner == cookie:
                return address, port, service, id_
        return None
