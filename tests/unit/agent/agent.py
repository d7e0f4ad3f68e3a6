"""The tracker, the reconciler and a fake backend, connected as in the daemon."""

from ebpfproxy.agent.reconciler import Reconciler, SyncResult
from ebpfproxy.api.event import AddressesChanged, Event, ServiceChanged, SliceChanged
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.service import Service, ServicePortName
from ebpfproxy.plan.service_plan import PlanContext, PlanKey
from tests.support.build import CONTEXT, endpoint, name, networks, service, slice_of
from tests.support.fake_backend import Entry, FakeBackend, FakeKernel, Key

LOCAL = AddressesChanged(frozenset(networks(("127.0.0.0/8", "192.0.2.10/32"))))


class Agent:
    """The tracker, the reconciler and a fake backend."""

    def __init__(
        self,
        kernel: FakeKernel | None = None,
        plane: FakeBackend | None = None,
        context: PlanContext = CONTEXT,
    ) -> None:
        self.plane = plane or FakeBackend(kernel)
        self.plane.open()
        self.kernel = self.plane.kernel
        self.tracker = Tracker(started=0.0)
        self.reconciler: Reconciler[Key, Entry] = Reconciler(self.plane, context)

    def fold(self, *changes: Service | EndpointSlice | Event) -> None:
        for each in changes:
            if isinstance(each, Service):
                self.tracker.fold(ServiceChanged(each.name, each))
            elif isinstance(each, EndpointSlice):
                self.tracker.fold(SliceChanged(each.name, each))
            else:
                self.tracker.fold(each)

    def plan(self) -> None:
        drained = self.tracker.drain()
        self.reconciler.plan(
            drained.state,
            drained.services,
            node_changed=drained.node_changed,
            host_changed=drained.host_changed,
        )

    def sync(self, *changes: Service | EndpointSlice | Event, verify: bool = False) -> SyncResult:
        """Process the events and sync. `kernel.writes` then has only the writes of this sync."""
        self.fold(*changes)
        self.plan()
        self.kernel.writes.clear()
        return self.reconciler.sync(verify)

    def served(self) -> set[str]:
        return {str(key[0]) for key in self.kernel.ports}


def key(called: str, family: Family = Family.IPV4, label: str = "") -> PlanKey:
    owner = name(called)
    return ServicePortName(owner.namespace, owner.name, label, Protocol.TCP), family


def gone(called: str) -> ServiceChanged:
    return ServiceChanged(name(called), None)


WEB = service("web", ips=["10.96.0.1"])
API = service("api", ips=["10.96.0.2"])
WEB_SLICE = slice_of("web", endpoint("10.1.0.1"))
API_SLICE = slice_of("api", endpoint("10.1.0.2"))
