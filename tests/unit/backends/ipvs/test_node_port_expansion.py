"""NodePorts times addresses: what the kernel holds of them, and back."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.delta import applied, diff
from ebpfproxy.backends.interface import Delta
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
    """Holds what it is told, as a backend's kernel does; `product` may be that of another run."""

    def __init__(self) -> None:
        self.held: dict[Key, Entry] = {}
        self.product = NodePortExpansion()

    def bring(self, wanted: Mapping[Key, Entry]) -> None:
        change = self.product.expand(diff(self.product.collapse(self.held), wanted))
        self.held = applied(self.held, change)

    def read(self) -> dict[Key, Entry]:
        return self.product.collapse(self.held)


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


def test_a_new_address_gets_what_all_others_have_and_one_that_is_gone_loses_it() -> None:
    kernel = Kernel()
    kernel.bring({address(ONE): True, server("0.0.0.0"): served()})
    delta: Delta[Key, Entry] = Delta({address(TWO): True}, frozenset({address(ONE)}))
    kernel.held = applied(kernel.held, kernel.product.expand(delta))
    assert servers(kernel) == [TWO]


def test_without_an_address_what_is_wanted_is_remembered_since_nobody_could_tell() -> None:
    kernel = Kernel()
    wanted: World = {server("0.0.0.0"): served()}
    kernel.bring(wanted)
    assert kernel.held == {}
    assert kernel.read() == wanted
    kernel.bring(wanted | {address(ONE): True})
    assert servers(kernel) == [ONE]


def test_what_somebody_took_from_one_address_is_put_again() -> None:
    kernel = Kernel()
    wanted: World = {address(ONE): True, address(TWO): True, server("0.0.0.0"): served()}
    kernel.bring(wanted)
    del kernel.held[server(TWO)]
    assert kernel.read()[server("0.0.0.0")] is False
    kernel.bring(wanted)
    assert servers(kernel) == [ONE, TWO]


def test_what_is_half_there_goes_wholly_where_nobody_wants_it() -> None:
    kernel = Kernel()
    kernel.bring({address(ONE): True, address(TWO): True, server("0.0.0.0"): served()})
    del kernel.held[server(TWO)]
    kernel.bring({address(ONE): True, address(TWO): True})
    assert servers(kernel) == []


def test_an_external_ip_that_is_an_address_of_the_node_wins_for_its_port() -> None:
    kernel = Kernel()
    own: World = {server(ONE): served("sh")}
    everywhere: World = {address(ONE): True, address(TWO): True, server("0.0.0.0"): served()}
    kernel.bring(everywhere | own)
    assert kernel.held[server(ONE)] == served("sh")
    assert kernel.held[server(TWO)] == served()
    kernel.bring(everywhere)
    assert kernel.held[server(ONE)] == served()


def test_where_an_external_ip_wins_it_is_not_dropped_since_the_node_port_has_no_endpoint_here() -> None:
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


def test_what_kube_proxy_had_on_each_address_is_taken_over_without_a_gap() -> None:
    """It has no set of the addresses: those are virtual servers by themselves, until ours stand there."""
    kernel = Kernel()
    kernel.held = {server(ONE): served(), server(TWO): served()}
    wanted: World = {address(ONE): True, server("0.0.0.0"): served()}
    change = kernel.product.expand(diff(kernel.read(), wanted))
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
def test_whatever_was_before_the_kernel_comes_to_hold_what_is_wanted(
    previous: list[dict[Key, Entry]], wanted: dict[Key, Entry], restarted: bool
) -> None:
    kernel, fresh = Kernel(), Kernel()
    for world in previous:
        kernel.bring(world)
    if restarted:
        kernel.product = NodePortExpansion()
    kernel.bring(wanted)
    kernel.bring(wanted)  # a fresh run cannot tell what is asked for by itself before it was told
    fresh.bring(wanted)
    assert kernel.held == fresh.held
    assert kernel.read() == wanted
