"""Names and addresses are replaced by the same other ones everywhere, and networks keep their structure."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.diagnose.bundle.anonymize import Anonymizer
from ebpfproxy.model.address import (
    Address,
    contains,
    family,
    format_address,
    network,
    parse_address,
    parse_network,
)

_V4 = st.ip_addresses(v=4).map(lambda each: parse_address(str(each)))
_V6 = st.ip_addresses(v=6).map(lambda each: parse_address(str(each)))
_ANY = _V4 | _V6


def _common(one: Address, other: Address) -> int:
    """The length of the common prefix."""
    return 128 - (int.from_bytes(one) ^ int.from_bytes(other)).bit_length()


@given(one=_ANY, other=_ANY, key=st.binary(min_size=16, max_size=16))
def test_addresses_keep_their_family_and_common_prefixes(one: Address, other: Address, key: bytes) -> None:
    replace = Anonymizer(key).address
    assert family(replace(one)) is family(one)
    assert (replace(one) == replace(other)) == (one == other)
    assert _common(replace(one), replace(other)) == _common(one, other)


@given(address=_V4, length=st.integers(8, 32))
def test_an_address_stays_in_its_network(address: Address, length: int) -> None:
    anonymizer = Anonymizer(b"key")
    host = format_address(address)
    inside = anonymizer.text(f"{host} is in {format_address(network(address, 96 + length).address)}/{length}")
    replaced, _, _, net = inside.split()
    assert contains(parse_network(net), parse_address(replaced))


def test_addresses_in_text_are_replaced_with_their_ports() -> None:
    anonymizer = Anonymizer(b"key")
    text = "10.96.0.1:80 -> 10.244.1.3:8080 [fd00::1]:443 fd00::1 (10.96.0.1/32)"
    shown = anonymizer.text(text)
    for address in ("10.96.0.1", "10.244.1.3", "fd00::1"):
        assert address not in shown
    first = shown.split(":")[0]
    assert shown.endswith(f"({first}/32)")
    assert ":80 -> 10." in shown
    assert shown == anonymizer.text(text)
    assert shown != Anonymizer(b"other").text(text)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:10249",
        "[::1]:80",
        "0.0.0.0/0",
        "::/0",
        "12:34:56 lines",
        "0.2.0",
        "a1:b2:c3:d4:e5:f6",
        "fe80::1",
    ],
)
def test_what_identifies_nothing_stays(text: str) -> None:
    assert Anonymizer(b"key").text(text) == text


def test_names_are_replaced_wherever_they_are_known() -> None:
    anonymizer = Anonymizer(b"key")
    anonymizer.learn(["shop/cart:http", "default/api", "node-7"])
    shown = anonymizer.text(
        "service=shop/cart:http node=node-7 slice=shop/cart-x8k2 default/api; apis cartoon"
    )
    assert not {"shop", "cart", "node-7", "api"} & set(shown.replace("/", " ").replace("=", " ").split())
    assert "cart-x" not in shown
    assert "default/" in shown
    assert shown.endswith("; apis cartoon")
    name = anonymizer.name("shop/cart:http")
    assert name in shown
    assert name.endswith(":http")


def test_names_in_a_log_are_learned() -> None:
    anonymizer = Anonymizer(b"key")
    anonymizer.learn_from_log('msg="Rejected" service=shop/cart:http node="worker-3"')
    assert not {"shop", "cart"} & set(anonymizer.text("shop cart").split())
    assert "worker-3" not in anonymizer.text("on worker-3 now")


def test_json_keeps_its_members_and_words() -> None:
    anonymizer = Anonymizer(b"key")
    anonymizer.learn(["shop/cluster:http"])
    row = {"service": "shop/cluster:http", "lists": ["cluster"], "address": "10.1.2.3", "port": 80}
    shown = json.loads(anonymizer.json(json.dumps({"header": {"node": "n1"}, "endpoints": [row]})))
    (after,) = shown["endpoints"]
    assert (after["lists"], after["port"]) == (["cluster"], 80)
    assert after["service"] == anonymizer.name("shop/cluster:http")
    assert after["address"] == anonymizer.text("10.1.2.3") != "10.1.2.3"
    assert shown["header"]["node"] != "n1"
