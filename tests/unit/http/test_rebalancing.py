"""The page with the endpoints that get no new connections for now."""

import json

import pytest

from ebpfproxy.http.rebalancing import decode, encode
from ebpfproxy.model.address import Family, Protocol, parse_address
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.planned_endpoints import target_of

WEB = ServicePortName("default", "web", "http", Protocol.TCP)
FULL = {
    (WEB, Family.IPV4): frozenset(target_of(parse_address(f"10.1.0.{number}"), 8080) for number in (1, 2)),
    (WEB, Family.IPV6): frozenset([target_of(parse_address("fd01::1"), 443)]),
}


def test_the_page_names_services_and_endpoints() -> None:
    first, second = json.loads(encode(FULL))["services"]
    assert first == {
        "namespace": "default",
        "name": "web",
        "port": "http",
        "protocol": "TCP",
        "family": "IPv4",
        "fullEndpoints": ["10.1.0.1:8080", "10.1.0.2:8080"],
    }
    assert second["fullEndpoints"] == ["[fd01::1]:443"]


def test_it_is_read_as_it_was_written() -> None:
    assert decode(encode(FULL).decode()) == FULL
    assert decode(encode({}).decode()) == {}


@pytest.mark.parametrize(
    "text", ["", "404 page not found", "[]", "{}", '{"services": [{"name": "web"}]}', "3"]
)
def test_another_text_is_no_page(text: str) -> None:
    assert decode(text) == {}
