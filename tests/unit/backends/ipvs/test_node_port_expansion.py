"""NodePorts and addresses are expanded into kernel objects and collapsed again."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.delta import Delta, applied, diff
from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Entry, Key, Member, Server, ServerEntry
from ebpfproxy.backends.ipvs.node_port_expansion import NodePortExpansion
from ebpfproxy.linux.ipvs.messages import Flag
from ebpfproxy.model.address import Family, Protocol, format_address, parse_address
from ebpfproxy.plan.service_plan import Frontend

V4 = Family.IPV4
ONE, TWO = "192.0.2.1", "192.0.2.2"

World = dict[Key, Entry]


def address(text: str) -> Member:
    return Member(V4, sets.NODE_PORT_IP, text)


def server(text: str, port: int = 30080) -> Server:
    return Server(V4, Frontend(parse_address(text), port, Protocol.TCP))


def served(scheduler: str = "rr") -> ServerEntry:
    return ServerEntry(scheduler, Flag(0), 0, ())


def dropped(text: str) -> Member:
    return Member(V4, sets.NO_LOCAL, f"{text},tcp:30080")


class Kernel:
    """A kernel with the objects that were written. `expansion` may be that of another run."""

    def __init__(self) -> None:
        self.held: dict[Key, Entry] = {}
        self.expansion = NodePortExpansion()

    def bring(self, wanted: Mapping[Key, Entry]) -> None:
        change = self.expansion.expand(diff(self.expansion.collapse(self.held), wanted))
        self.held = applied(self.held, change)

    def read(self) -> dict[Key, Entry]:
        return self.expansion.collapse(self.held)


def servers(kernel: Kernel) -> list[str]:
    keys = (key for key in kernel.held if isinstance(key, Server))
    return sorted(format_address(key.frontend.address) for key in keys)


def test_a_node_port_is_a_virtual_server_on_each_address() -> None:
    kernel = Kernel()
    wanted: World = {
        address(ONE): True,
        address(TWO): True,
        server("0.0.0.0"): served(),
        dropped("0.0.0.0"): True,
    }
    kernel.bring(wanted)
    assert servers(kernel) == [ONE, TWO]
    assert kernel.held.keys() >= {dropped(ONE), dropped(TWO)}
    assert kernel.read() == wanted


def test_a_new_address_gets_all_node_ports_and_a_removed_one_loses_them() -> None:
    kernel = Kernel()
    kernel.bring({address(ONE): True, server("0.0.0.0"): served()})
    delta: Delta[Key, Entry] = Delta({address(TWO): True}, frozenset({address(ONE)}))
    kernel.held = applied(kernel.held, kernel.expansion.expand(delta))
    assert servers(kernel) == [TWO]


def test_without_an_address_general_entries_are_reported_as_present() -> None:
    kernel = Kernel()
    wanted: World = {server("0.0.0.0"): served()}
    kernel.bring(wanted)
    assert kernel.held == {}
    assert kernel.read() == wanted
    kernel.bring(wanted | {address(ONE): True})
    assert servers(kernel) == [ONE]


def test_an_object_that_another_program_removed_from_one_address_is_restored() -> None:
    kernel = Kernel()
    wanted: World = {address(ONE): True, address(TWO): True, server("0.0.0.0"): served()}
    kernel.bring(wanted)
    del kernel.held[server(TWO)]
    assert kernel.read()[server("0.0.0.0")] is False
    kernel.bring(wanted)
    assert servers(kernel) == [ONE, TWO]


def test_an_incomplete_node_port_that_no_plan_has_is_removed_completely() -> None:
    kernel = Kernel()
    kernel.bring({address(ONE): True, address(TWO): True, server("0.0.0.0"): served()})
    del kernel.held[server(TWO)]
    kernel.bring({address(ONE): True, address(TWO): True})
    assert servers(kernel) == []


def test_an_external_ip_that_is_an_address_of_the_node_takes_precedence_for_its_port() -> None:
    kernel = Kernel()
    own: World = {server(ONE): served("sh")}
    everywhere: World = {address(ONE): True, address(TWO): True, server("0.0.0.0"): served()}
    kernel.bring(everywhere | own)
    assert kernel.held[server(ONE)] == served("sh")
    assert kernel.held[server(TWO)] == served()
    kernel.bring(everywhere)
    assert kernel.held[server(ONE)] == served()


def test_an_external_ip_with_precedence_is_not_dropped_for_the_node_ports_lack_of_local_endpoints() -> None:
    kernel = Kernel()
    own: World = {server(ONE): served("sh")}
    everywhere: World = {
        address(ONE): True,
        address(TWO): True,
        server("0.0.0.0"): served(),
        dropped("0.0.0.0"): True,
    }
    for before in ({}, own, everywhere):
        kernel.bring(before)
        kernel.bring(everywhere | own)
        assert dropped(TWO) in kernel.held
        assert dropped(ONE) not in kernel.held
        assert kernel.read() == everywhere | own
    kernel.bring(everywhere)
    assert dropped(ONE) in kernel.held


def test_virtual_servers_of_kube_proxy_are_taken_over_without_interruption() -> None:
    """kube-proxy has no set of the addresses. So its virtual servers are specific entries until the agent's
    own replace them.
    """
    kernel = Kernel()
    kernel.held = {server(ONE): served(), server(TWO): served()}
    wanted: World = {address(ONE): True, server("0.0.0.0"): served()}
    change = kernel.expansion.expand(diff(kernel.read(), wanted))
    assert change.drops == {server(TWO)}


WORLDS = st.fixed_dictionaries(
    {},
    optional={
        address(ONE): st.just(True),
        address(TWO): st.just(True),
        server("0.0.0.0"): st.sampled_from([served(), served("lc")]),
        server(ONE): st.just(served("sh")),
        server(TWO): st.just(served()),
        dropped("0.0.0.0"): st.just(True),
        dropped(TWO): st.just(True),
        server("10.96.0.1", 80): st.just(served()),
    },
)


@given(st.lists(WORLDS, max_size=4), WORLDS, st.booleans())
def test_from_any_previous_state_the_kernel_reaches_the_desired_state(
    previous: list[dict[Key, Entry]], wanted: dict[Key, Entry], restarted: bool
) -> None:
    kernel, fresh = Kernel(), Kernel()
    for world in previous:
        kernel.bring(world)
    if restarted:
        kernel.expansion = NodePortExpansion()
    kernel.bring(wanted)
    kernel.bring(wanted)  # only after this does a fresh run know the specific keys
    fresh.bring(wanted)
    assert kernel.held == fresh.held
    assert kernel.read() == wanted
