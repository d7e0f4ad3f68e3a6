"""Changes in random order that end no connection of the zoo: of the agent, devices, addresses and routes."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ebpfproxy.bench.agent_runner import AgentRunner
from ebpfproxy.errors import Unsupported
from ebpfproxy.lab import Pod
from tests.kernel.cluster import START_PATIENCE
from tests.kernel.zoo.base import Zoo


class _Toggle(NamedTuple):
    """Commands of ip(8) on the node that make a change, and those that revert it. {uplink}: its name now."""

    make: tuple[str, ...]
    revert: tuple[str, ...]


class RandomChanges:
    """Makes changes. Each change of the network is reverted when it is drawn again."""

    def __init__(self, node: Zoo, runner: AgentRunner, seed: str) -> None:
        self._node, self._runner = node, runner
        self._random = random.Random(seed)
        self._uplink = "eth0"
        self._pod: Pod | None = None
        self._made: set[str] = set()
        self._toggles = dict(_toggles(node))
        self._kinds: dict[str, Callable[[], None]] = {
            "kill the agent": runner.crash,
            "kill the agent while it starts": self._crash_twice,
            "switch the mode": self._switch,
            "switch the mode and kill the agent": self._switch_and_crash,
            "rename the uplink": self._rename_uplink,
            "a pod": self._change_pod,
            "a second network card": self._second_card,
            "policy routing": self._policy_routing,
            "neighbors": lambda: node.ip(f"neigh flush dev {self._uplink}"),
        }
        self.done: list[str] = []
        """The changes so far, in order."""

    def all_once(self) -> Iterator[None]:
        """Make each change once, in random order. Yields after each."""
        names = [*self._kinds, *self._toggles]
        self._random.shuffle(names)
        for name in names:
            self.done.append(name)
            if name in self._kinds:
                self._kinds[name]()
            else:
                self._toggle(name)
            yield

    def pause(self) -> float:
        """Seconds until the next change: some follow at once."""
        return self._random.choice((0.0, 0.05, 0.3))

    def _toggle(self, name: str) -> None:
        made = name in self._made
        commands = self._toggles[name].revert if made else self._toggles[name].make
        with contextlib.suppress(Unsupported):  # a kind of device that this kernel lacks
            self._node.ip(*(each.format(uplink=self._uplink) for each in commands))
            self._made ^= {name}

    def _crash_twice(self) -> None:
        self._runner.crash()
        self._runner.crash()

    def _switch(self) -> None:
        self._runner.agent.await_sync(timeout=START_PATIENCE)
        self._runner.switch()

    def _switch_and_crash(self) -> None:
        self._switch()
        self._runner.crash()

    def _rename_uplink(self) -> None:
        name = {"eth0": "lan0", "lan0": "eth0"}[self._uplink]
        self._node.ip(f"link set {self._uplink} name {name}")
        self._uplink = name

    def _change_pod(self) -> None:
        if self._pod:
            self._node.lab.remove_pod(self._pod)
            self._pod = None
        else:
            self._pod = self._node.lab.pod("idle")

    def _second_card(self) -> None:
        self._made ^= {"second"}
        if "second" in self._made:
            self._node.second_uplink()
        else:
            self._node.lab.ip(self._node.router, "link del second")

    def _policy_routing(self) -> None:
        self._made ^= {"rule"}
        verb = "add" if "rule" in self._made else "del"
        own = self._node.node
        for family, address in (("-4", own.v4), ("-6", own.v6)):
            rule = ["from", address, "lookup", "main", "priority", "600"]
            own.run(["ip", family, "rule", verb, *rule])


def _toggles(node: Zoo) -> Iterator[tuple[str, _Toggle]]:
    own, gateway = node.node, node.lab.addresses.router
    number = node.lab.number
    for device, kind in (
        ("dum9", "dummy"),
        ("br9", "bridge"),
        ("mv9", "macvlan mode bridge"),
        ("vxlan9", "vxlan id 9 dstport 4790 local 127.0.0.1"),
        ("tun9", "veth peer name tun9p"),
    ):
        link = "link {uplink} " if "macvlan" in kind else ""
        add = f"link add {link}{device} type {kind}"
        yield (
            f"the device {device}",
            _Toggle(
                (add, f"addr add 192.0.2.9/24 dev {device}", f"link set {device} up"),
                (f"link del {device}",),
            ),
        )
    yield (
        "a device of another namespace",
        _Toggle(
            (
                "link add moved9 type veth peer name moved9p",
                f"link set moved9p netns {node.second.namespace}",
            ),
            ("link del moved9",),
        ),
    )
    yield (
        "the name of the server's device",
        _Toggle(("link set vetha name vetha2",), ("link set vetha2 name vetha",)),
    )
    yield "the MTU", _Toggle(("link set {uplink} mtu 1400",), ("link set {uplink} mtu 1500",))
    for name, four, six in (
        ("an address of another network", "198.51.100.9/24", "2001:db8:9::9/64"),
        ("a virtual address", f"172.18.{number}.60/32", f"fd00:172:18:{number}::60/128"),
    ):
        # Deprecated, as that of VRRP: otherwise the kernel may choose it as the source of connections, which
        # end when it is removed.
        yield (
            name,
            _Toggle(
                (f"addr add {four} dev {{uplink}}", f"addr add {six} dev {{uplink}} nodad preferred_lft 0"),
                (f"addr del {four} dev {{uplink}}", f"addr del {six} dev {{uplink}}"),
            ),
        )
    yield "an address of lo", _both("addr", ("203.0.113.9/32", "dev lo"), ("2001:db8:a::9/128", "dev lo"))
    yield (
        "a route",
        _both("route", ("203.0.113.0/24", f"via {gateway.v4}"), ("2001:db8:b::/64", f"via {gateway.v6}")),
    )
    yield (
        "a route that rejects",
        _both("route", ("blackhole 203.0.112.0/24", ""), ("unreachable 2001:db8:c::/64", "")),
    )
    yield (
        "a second default route",
        _both(
            "route",
            ("default", f"via {gateway.v4} dev {{uplink}} metric 700"),
            ("default", f"via {gateway.v6} dev {{uplink}} metric 700"),
        ),
    )
    yield (
        "a preferred source",
        _Toggle(
            (f"route replace default via {gateway.v4} dev {{uplink}} src {own.v4}",),
            (f"route replace default via {gateway.v4} dev {{uplink}}",),
        ),
    )


def _both(subject: str, four: tuple[str, str], six: tuple[str, str]) -> _Toggle:
    """What is added in both families and deleted again, with these options."""
    pairs = [f"{each} {options}" for each, options in (four, six)]
    return _Toggle(*(tuple(f"{subject} {verb} {each}" for each in pairs) for verb in ("add", "del")))
