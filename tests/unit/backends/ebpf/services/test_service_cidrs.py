"""The network around all ServiceCIDRs contains each of their addresses, and matches nothing without one."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.ebpf.services.service_cidrs import bounds
from ebpfproxy.model.address import Address, Network, network, parse_address, parse_network

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


def matches(networks: list[Network], address: Address) -> bool:
    """As may_be_cluster_ip() of bpf/unrelated.h."""
    cidrs4, mask4, cidrs6, mask6 = bounds(networks)
    if address[:12] == bytes(10) + b"\xff\xff":
        return bool(_U32.unpack(address[12:])[0] & mask4 == cidrs4)
    return bool(_U64.unpack(address[:8])[0] & mask6 == cidrs6)


def v4(bits: bytes, length: int) -> Network:
    return network(Address(bytes(10) + b"\xff\xff" + bits), 96 + length)


V4 = st.builds(v4, st.binary(min_size=4, max_size=4), st.integers(1, 32))
V6 = st.builds(
    lambda bits, length: network(Address(b"\xfd" + bits), length),
    st.binary(min_size=15, max_size=15),
    st.integers(8, 128),
)


@given(st.lists(V4 | V6, min_size=1), st.data())
def test_each_address_of_a_service_cidr_matches(networks: list[Network], data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(networks))
    host = data.draw(st.integers(0, (1 << 128 - chosen.length) - 1))
    address = Address((int.from_bytes(chosen.address) | host).to_bytes(16))
    assert matches(networks, address)


def test_without_a_service_cidr_of_the_family_nothing_matches() -> None:
    for text in ("0.0.0.0", "10.96.0.1", "255.255.255.255", "::", "fd00::1"):
        assert matches([], parse_address(text)) is False
    assert not matches([parse_network("fd00::/112")], parse_address("10.96.0.1"))


def test_one_service_cidr_is_its_own_bound() -> None:
    cidrs = [parse_network("10.96.0.0/12"), parse_network("fd00:10:96::/112")]
    assert matches(cidrs, parse_address("10.111.255.255"))
    assert not matches(cidrs, parse_address("10.112.0.0"))
    assert matches(cidrs, parse_address("fd00:10:96::1:0")), "only 64 bits are compared"
    assert not matches(cidrs, parse_address("fd00:10:96:1::1"))
