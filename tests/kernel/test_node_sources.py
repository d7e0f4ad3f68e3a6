"""A route gets another preferred source while the agent runs: new connections are masqueraded with it."""

import json

import pytest

from ebpfproxy.lab.addresses import Pair
from tests.kernel.clients import outcomes
from tests.kernel.cluster import eventually
from tests.kernel.two_nodes import Everywhere, name_and_client
from tests.kernel.uplinks import FIRST, NAMES, Uplinks, every

pytestmark = [pytest.mark.kernel, pytest.mark.ways("ebpf-on", "ebpf-off")]

OTHER = Pair("172.30.7.7", "fd00:172:30::7")
"""Another address of the node."""
ROWS = every([("NodePort", FIRST)])


def seen(uplinks: Uplinks, web: Everywhere) -> set[tuple[str, str]]:
    """The name of the endpoint, and the address that it saw, for each protocol and family."""
    found = outcomes(uplinks.x, [uplinks.dial(web, row, 2) for row in ROWS])
    return set(map(name_and_client, found))


def own_flags(uplinks: Uplinks) -> tuple[str, str]:
    return f"--manifests={uplinks.folder}", f"--hostname-override={uplinks.lab.node_name}"


def dumped(uplinks: Uplinks) -> set[str]:
    """The masquerade addresses of the first uplink that `dump devices` shows."""
    rows = json.loads(uplinks.ebpfproxy("dump", "devices", "-o=json").stdout)
    (row,) = (each for each in rows if each["device"] == FIRST)
    return set(row["masquerade"])


def explained(uplinks: Uplinks, web: Everywhere, family: str) -> set[str]:
    """The address of the node that `explain` predicts for the client x."""
    address = getattr(uplinks.node, family)
    frontend = f"[{address}]:{web.node_port}" if family == "v6" else f"{address}:{web.node_port}"
    arguments = (frontend, f"--from={getattr(uplinks.x, family)}", "--kernel", "-o=json")
    found = json.loads(uplinks.ebpfproxy("explain", *arguments, *own_flags(uplinks), check=False).stdout)
    ends = [end for each in found["explanations"] for end in each["endpoints"]]
    return {address for end in ends for address in end["seen"]}


def test_new_connections_get_the_preferred_source_of_the_route(uplinks: Uplinks) -> None:
    web = uplinks.everywhere().to(uplinks.d)
    first = uplinks.addresses[FIRST]
    name = NAMES["there"]
    assert seen(uplinks, web) == {(name, first.v4), (name, first.v6)}
    gateway = uplinks.gateways[FIRST]
    device = uplinks.router_devices[FIRST]
    back = [f"{OTHER.v4}/32 dev {device}", f"{OTHER.v6}/128 via {first.v6} dev {device}"]
    addresses = [
        (f"addr add {net} dev {FIRST} {flags}", f"addr del {net} dev {FIRST}")
        for net, flags in ((f"{OTHER.v4}/32", ""), (f"{OTHER.v6}/128", "nodad"))
    ]
    routes = [
        (f"route replace {route} src {source}", f"route replace {route}")
        for route, source in (
            (f"default via {gateway.v4} dev {FIRST}", OTHER.v4),
            (f"default via {gateway.v6} dev {FIRST}", OTHER.v6),
        )
    ]
    with uplinks.routes(uplinks.lab.router, *back), uplinks.commands(uplinks.node, [*addresses, *routes]):
        wanted = {(name, OTHER.v4), (name, OTHER.v6)}
        eventually(lambda: seen(uplinks, web) == wanted, "the preferred source")
        assert explained(uplinks, web, "v4") == {OTHER.v4}
        assert explained(uplinks, web, "v6") == {OTHER.v6}
        verified = uplinks.ebpfproxy("verify", *own_flags(uplinks), check=False)
        assert "source" not in verified.stdout, verified.stdout
        assert dumped(uplinks) >= set(OTHER)
    wanted = {(name, first.v4), (name, first.v6)}
    eventually(lambda: seen(uplinks, web) == wanted, "the first address")
