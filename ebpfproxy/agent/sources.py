"""The sources: threads that put events into the inbox of the control thread.

They watch the API server or a folder of manifests, the kernel's local addresses and devices, and the
configuration file. A source that ends by itself ends the agent, so that no state becomes stale unnoticed.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ebpfproxy.agent import api_events, listening_sockets
from ebpfproxy.agent.inbox import Died, Inbox, Received, Reload
from ebpfproxy.agent.protected_claims import RejectedClaim
from ebpfproxy.agent.service_events import ServiceEvents
from ebpfproxy.api.event import (
    ADDRESSES,
    DEVICES,
    LISTENING,
    AddressesChanged,
    ApiServerReached,
    DevicesChanged,
    Event,
    ListeningChanged,
    ServiceChanged,
    Synced,
)
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.config import Config
from ebpfproxy.config.follow import follow
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.linux.netlink import links, local_addresses
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Network
from ebpfproxy.model.cluster import Listening
from ebpfproxy.model.device import Device
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.service_plan import Protection, Role

if TYPE_CHECKING:
    from ebpfproxy.api.watch import Access, ApiSource, Session

log = Logger(__name__)

NOT_VERIFIED = "Not verifying the certificate of the API server"
"""The kubeconfig has `insecure-skip-tls-verify`. Any program that answers at the address is taken for the API
server."""

Run = Callable[[threading.Event], object]


def needs_peers(config: Config) -> bool:
    """Return whether all Nodes are watched. With --manifests they cost nothing: the folder has been read."""
    is_protection = config.protected_addresses is Protection.NODES
    is_edge = config.role is Role.EDGE
    return is_edge or config.ebpf_dsr_port > 0 or is_protection or config.manifests is not None


def tracker_for(config: Config) -> Tracker:
    """Return a tracker of what the sources report, which awaits what plans need."""
    return Tracker(
        time.time(),
        node=config.role is not Role.EDGE,
        peers=needs_peers(config),
        pods=config.host_ports or config.socket_lb_annotations,
        namespaces=config.socket_lb_annotations,
        listening=True,
    )


def _about_mode(mode: str, unavailable: Mapping[str, str]) -> list[api_events.Report]:
    return [*api_events.deprecation(mode), *api_events.fallback(mode, unavailable)]


class Sources:
    """The threads of all sources, from `start` until the end of the agent."""

    def __init__(
        self,
        config: Config,
        inbox: Inbox,
        metrics: Metrics,
        content: bytes | None,
        further: Mapping[str, Run] = MappingProxyType({}),
    ) -> None:
        """`content` is that of the configuration file that was considered last (`Loaded.seen`). `further` are
        functions that run as sources, by name."""
        self._config = config
        self._inbox = inbox
        self._metrics = metrics
        self._content = content
        self._further = further
        self._is_edge = config.role is Role.EDGE
        self._node_name = "" if self._is_edge else config.node_name
        self._session: Callable[[], Session] | None = None  # to the API server
        self._service_events: ServiceEvents | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Start one thread for each source."""
        for name, run in self._sources():
            threading.Thread(target=self._supervise, args=(name, run), name=name, daemon=True).start()

    def stop(self) -> None:
        """Ask the sources to end, without waiting for them."""
        self._stop.set()

    def report_start(
        self,
        failures: Mapping[str, str],
        mode: str = "",
        unavailable: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create Events of the Node for the start of the agent, in the background.

        `failures`: the reasons why HTTP servers did not start, by name. `mode` and `unavailable`: as in
        `report_mode`.
        """
        reports = [api_events.STARTING]
        reports += [
            api_events.Report(api_events.FAILED_SERVERS[name], note) for name, note in failures.items()
        ]
        self._report([*reports, *_about_mode(mode, unavailable)])

    def report_mode(self, mode: str, unavailable: Mapping[str, str]) -> None:
        """Create an Event of the Node if Kubernetes has deprecated `mode`, or if `auto` prefers others.

        `unavailable`: why these could not be selected, by name.
        """
        self._report(_about_mode(mode, unavailable))

    def report_health_checks(self, reasons: Mapping[NamespacedName, str]) -> None:
        """Create an Event of each Service whose healthCheckNodePort is not served. Any thread may call it."""
        self._report(api_events.health_checks(self._config.node_name, reasons))

    def service_changed(self, changed: ServiceChanged) -> None:
        """Create an Event of a Service with an annotation beyond a bound, in the background."""
        if self._service_events:
            self._service_events.seen(changed)

    def report_rejected(self, claim: RejectedClaim) -> None:
        """Create an Event of a Service with an address that is not served, in the background."""
        if self._service_events:
            self._service_events.rejected(claim)

    def _report(self, reports: Sequence[api_events.Report]) -> None:
        if self._session and reports:
            arguments = (self._config.node_name, self._session, reports)
            threading.Thread(target=api_events.create, args=arguments, name="api-event", daemon=True).start()

    def connect(self) -> "Session":
        """Return a session with the API server, which the caller closes. Only after `start`, and without
        --manifests. Raises SourceError."""
        assert self._session
        return self._session()

    def put(self, event: Event) -> None:
        """Put an event into the inbox. Any thread may call it."""
        self._inbox.put(Received(time.monotonic(), event))

    def _sources(self) -> Iterator[tuple[str, Run]]:
        yield "local-addresses", self._watch_addresses
        yield "devices", self._watch_devices
        yield "listening", self._watch_listening
        yield from self._further.items()
        if self._config.config is not None:
            yield "configuration", functools.partial(self._watch_file, self._config.config)
        if self._config.manifests is not None:
            from ebpfproxy.api.manifest_folder import FileSource

            yield "manifests", FileSource(self._config.manifests, self._node_name, self.put).run
        else:
            from ebpfproxy.api.watch import load_configuration

            kubeconfig = str(self._config.kubeconfig or "")
            requests = self._metrics.rest_client
            configuration = load_configuration(kubeconfig, self._config.master, observer=requests)
            configuration.reached = self._api_server_reached
            if not configuration.verifies:
                hint = "set certificate-authority in the kubeconfig"
                log.warning(NOT_VERIFIED, server=configuration.server, hint=hint)
            if not self._is_edge:  # Events are about the Node
                self._session = configuration.session
                self._service_events = ServiceEvents(self._node_name, configuration.session)
                yield "service-events", self._service_events.run
            yield "api", self._api(configuration).run

    def _api(self, access: "Access") -> "ApiSource":
        from ebpfproxy.api.watch import ApiSource

        return ApiSource(
            access,
            self._node_name,
            self.put,
            self._metrics,
            pods=self._config.host_ports,
            annotations=self._config.socket_lb_annotations,
            peers=needs_peers(self._config),
        )

    def _api_server_reached(self, address: Address, port: int) -> None:
        self.put(ApiServerReached(address, port))

    def _supervise(self, name: str, run: Run) -> None:
        # Shown by top -H, and read by `ebpfproxy bench churn`: the kernel keeps 15 characters.
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:15])
        try:
            run(self._stop)
        except BaseException as error:
            self._inbox.put(Died(name, error))
        else:
            if not self._stop.is_set():
                self._inbox.put(Died(name, RuntimeError("it ended by itself")))

    def _watch_addresses(self, stop: threading.Event) -> None:
        def changed(networks: frozenset[Network]) -> None:
            self.put(AddressesChanged(networks))
            self.put(Synced(ADDRESSES))

        local_addresses.watch(changed, stop)

    def _watch_devices(self, stop: threading.Event) -> None:
        def changed(devices: tuple[Device, ...]) -> None:
            self.put(DevicesChanged(devices))
            self.put(Synced(DEVICES))

        links.watch(changed, stop)

    def _watch_listening(self, stop: threading.Event) -> None:
        def changed(listening: Listening) -> None:
            self.put(ListeningChanged(listening))
            self.put(Synced(LISTENING))

        listening_sockets.watch(changed, stop)

    def _watch_file(self, path: Path, stop: threading.Event) -> None:
        follow(path, stop, lambda: self._inbox.put(Reload(f"{path} has changed")), self._content)
