"""Reads what the rendering of plans depends on besides plans and settings (`forwarding.Surroundings`).

Answers are kept until `forget`, so that a plan with many endpoints needs one lookup for each of them. If the
kernel fails to answer, the Service gets the defaults.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ebpfproxy.backends.ipvs import prerequisites
from ebpfproxy.backends.ipvs.forwarding import Surroundings
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import local_addresses, routing
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Address, Network, contains

_T = TypeVar("_T")
_SINGLE = 128


class Answers(NamedTuple):
    """What the rendering of a plan asked: whether addresses are local, and whether they have a gateway."""

    local: dict[Address, bool]
    gateways: dict[Address, bool]

    def __bool__(self) -> bool:
        return bool(self.local or self.gateways)

    def hold(self, now: Surroundings) -> bool:
        """Return whether all of them would be the same now."""
        return all(now.is_local(address) == answer for address, answer in self.local.items()) and all(
            now.has_gateway(address) == answer for address, answer in self.gateways.items()
        )


def recorded(surroundings: Surroundings) -> tuple[Surroundings, Answers]:
    """Return the same surroundings, and where their answers about addresses are recorded."""
    answers = Answers({}, {})

    def is_local(address: Address) -> bool:
        return answers.local.setdefault(address, surroundings.is_local(address))

    def has_gateway(address: Address) -> bool:
        return answers.gateways.setdefault(address, surroundings.has_gateway(address))

    return surroundings._replace(is_local=is_local, has_gateway=has_gateway), answers


class KernelSurroundings:
    """The surroundings in the calling thread's network namespace."""

    def __init__(self) -> None:
        self._schedulers: dict[str, bool] = {}
        self._gateways: dict[Address, bool] = {}
        self._local: frozenset[Network] | None = None
        self._wide: list[Network] = []
        self.may_differ = False
        """Whether `forget` was called since the caller last set this to False."""

    def forget(self) -> None:
        """Read routes and addresses again. The schedulers of a kernel do not change."""
        self._gateways.clear()
        self._local = None
        self.may_differ = True

    def answers(self) -> Surroundings:
        return Surroundings(
            _or(self._has_scheduler, False), _or(self._is_local, False), _or(self._has_gateway, True)
        )

    def _is_local(self, address: Address) -> bool:
        if self._local is None:
            self._local = local_addresses.read()
            self._wide = [net for net in self._local if net.length != _SINGLE]
        return Network(address, _SINGLE) in self._local or any(contains(net, address) for net in self._wide)

    def _has_scheduler(self, name: str) -> bool:
        if name not in self._schedulers:
            with netns.throw_away():
                self._schedulers[name] = prerequisites.has_scheduler(name)
        return self._schedulers[name]

    def _has_gateway(self, address: Address) -> bool:
        if address not in self._gateways:
            self._gateways[address] = routing.route_to(address).has_gateway
        return self._gateways[address]


def _or(answer: Callable[[_T], bool], unknown: bool) -> Callable[[_T], bool]:
    """Return the function with the answer `unknown` instead of an error of the kernel."""

    def answered(question: _T) -> bool:
        try:
            return answer(question)
        except KernelError:
            return unknown

    return answered
