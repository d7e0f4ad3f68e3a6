"""A mode with the backend in memory. It records its calls and raises configured errors."""

from collections.abc import Callable

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Callbacks, Mode
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError
from ebpfproxy.model.address import Family
from ebpfproxy.plan.balancing import EVERYTHING
from ebpfproxy.plan.service_plan import PlanKey
from tests.support.fake_backend import FakeBackend, FakeKernel


class FakeMode(Mode):
    """`left`: how often `drain` reports that state is left."""

    def __init__(self, name: str, *findings: Finding, left: int = 0) -> None:
        self.name = name
        self.findings = findings
        self.left = left
        self.trial: tuple[Finding, ...] = ()
        """The result of `try_out`."""
        self.tried_out = 0
        self.kernel = FakeKernel()
        self.plane = FakeBackend(self.kernel)
        self.fails: KernelError | None = None
        """The exception that `serve` raises."""
        self.lacking: KernelError | None = None
        """The reason why it forwards nothing after a sync."""
        self.outdated: set[PlanKey] = set()
        """The plans that it would render differently now."""
        self.prepared: Config | None = None
        """The configuration of the last `serve`."""
        self.owns_namespace = True
        self.uses_kernel_nat = False
        self.balancing = EVERYTHING
        self.drained = 0
        self.translates = True
        """The argument `translates` of the last `drain`, for IPv4."""

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return self.findings

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        self.tried_out += 1
        return self.trial

    def serve(self, config: Config, callbacks: Callbacks) -> FakeBackend:
        if self.fails:
            raise self.fails
        self.prepared = config
        self.plane = FakeBackend(self.kernel)
        self.plane.owns_namespace = self.owns_namespace
        self.plane.failure = self.lacking
        self.plane.differing = self.outdated
        return self.plane

    def inspect(self, config: Config) -> FakeBackend:
        return FakeBackend(self.kernel)

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        found = [str(key[0]) for key in self.kernel.ports]
        if not dry_run:
            self.kernel.ports.clear()
            self.kernel.frontends.clear()
            self.kernel.networks.clear()
        return found

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        self.translates = translates(Family.IPV4)
        self.drained += 1
        self.left -= 1
        return self.remove(config), self.left >= 0
