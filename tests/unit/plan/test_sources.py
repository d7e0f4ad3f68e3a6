"""Which source addresses a device with several has for which destinations."""

import pytest

from ebpfproxy.model.address import format_address, network, parse_address, parse_network
from ebpfproxy.model.device import ETHERNET, Device
from ebpfproxy.plan.devices import plan_devices
from ebpfproxy.plan.service_plan import Source
from ebpfproxy.plan.sources import plan_sources, source_for
from tests.support import build
from tests.support.build import CONTEXT


def device(*addresses: str, preferred: dict[str, str] | None = None) -> Device:
    """`addresses` have a prefix length. `preferred`: the preferred source by the network of next hops."""
    connected = []
    for text in addresses:
        address = parse_address(text.partition("/")[0])
        length = parse_network("::" + text[text.index("/") :]).length + (0 if ":" in text else 96)
        connected.append((network(address, length), address))
    routes = ((parse_network(net), parse_address(source)) for net, source in (preferred or {}).items())
    return Device(
        2,
        "eth0",
        "",
        ETHERNET,
        True,
        addresses=tuple(address for _, address in connected),
        default_route=True,
        connected=tuple(connected),
        preferred=tuple(routes),
    )


def planned(of: Device) -> tuple[Source, ...]:
    (plan,) = plan_devices((of,), build.node(), CONTEXT, False, ())
    return plan.sources


def source(of: Device, destination: str, gateway: str = "") -> str:
    """The planned source; the first address of the device if the plan has none."""
    to = parse_address(destination)
    found = source_for(planned(of), parse_address(gateway) if gateway else to, to)
    return format_address(found) if found else "usual"


@pytest.mark.parametrize(
    "one",
    [
        device(),
        device("192.0.2.10/24"),
        device("192.0.2.10/24", "2001:db8::10/64"),
        device("192.0.2.10/24", "192.0.2.11/24"),  # the kernel never selects a secondary address
        device("192.0.2.10/24", preferred={"192.0.2.1/32": "192.0.2.10"}),
    ],
)
def test_a_device_that_always_uses_one_address_of_a_family_has_no_table(one: Device) -> None:
    assert planned(one) == ()


def test_a_deprecated_address_is_no_source() -> None:
    one = device("2001:db8::10/64", "fd00::10/64")
    assert planned(one)
    assert planned(one._replace(connected=one.connected[:1])) == ()


def test_ipv4_uses_the_address_in_the_network_of_the_next_hop() -> None:
    two = device("203.0.113.2/24", "192.0.2.10/24")
    assert source(two, "10.1.0.1", "192.0.2.1") == "192.0.2.10"
    assert source(two, "10.1.0.1", "203.0.113.1") == "203.0.113.2"
    assert source(two, "192.0.2.99") == "192.0.2.10"
    assert source(two, "10.1.0.1", "198.51.100.1") == "usual"
    assert source(two, "10.1.0.1", "fe80::1") == "usual"


def test_a_preferred_source_precedes_the_network_of_the_next_hop() -> None:
    one = device("192.0.2.10/24", preferred={"192.0.2.1/32": "203.0.113.7", "198.51.100.0/24": "203.0.113.8"})
    assert source(one, "10.1.0.1", "192.0.2.1") == "203.0.113.7"
    assert source(one, "198.51.100.5") == "203.0.113.8"
    assert source(one, "192.0.2.5") == "192.0.2.10"


def test_ipv6_uses_unique_local_addresses_for_unique_local_destinations_only() -> None:
    for addresses in (("2001:db8::10/64", "fd00:5::10/64"), ("fd00:5::10/64", "2001:db8::10/64")):
        both = device(*addresses)
        assert source(both, "fd00:244::1", "fe80::1") == "fd00:5::10"
        assert source(both, "2a00::1", "fe80::1") == "2001:db8::10"


def test_ipv6_uses_the_address_with_the_longest_common_prefix() -> None:
    two = device("2001:db8:1::10/64", "2a00:1::10/64", "2001:db8:2::10/64")
    assert source(two, "2001:db8:2:5::1") == "2001:db8:2::10"
    assert source(two, "2001:db8:1:5::1") == "2001:db8:1::10"
    assert source(two, "2a00:2::1") == "2a00:1::10"
    assert source(two, "fd00::1") == source(two, "4000::1") == "2001:db8:1::10"


def test_beyond_the_prefix_of_an_address_the_first_one_is_used() -> None:
    two = device("2001:db8::10/64", "2001:db8::20/64", "fd00::1/64")
    assert source(two, "2001:db8::21") == "2001:db8::10"


def test_each_family_has_its_own_address_behind_a_gateway_of_the_other() -> None:
    one = device("192.0.2.10/24", "2001:db8::10/64", preferred={"2001:db8::1/128": "2001:db8::99"})
    assert source(one, "10.1.0.1", "2001:db8::1") == "usual"
    assert source(one, "2a00::1", "2001:db8::1") == "2001:db8::99"


def test_the_table_is_complete_if_no_address_is_usual() -> None:
    assert [format_address(each.address) for each in plan_sources(device("192.0.2.10/24"), ())] == [
        "192.0.2.10"
    ]
