"""Members of ipsets, encoded and decoded without a kernel."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.linux.ipset import messages
from ebpfproxy.linux.ipset.messages import IpSet
from ebpfproxy.model.address import (
    V4_BITS,
    V4_PREFIX,
    Address,
    Family,
    family,
    format_address,
    format_network,
    network,
)

RAW = {Family.IPV4: 4, Family.IPV6: 16}


def addresses(of: Family) -> st.SearchStrategy[Address]:
    raw = st.binary(min_size=RAW[of], max_size=RAW[of])
    whole = raw.map(lambda value: Address(V4_PREFIX + value if of is Family.IPV4 else value))
    return whole.filter(lambda address: family(address) is of)


@st.composite
def members(draw: st.DrawFn, of: Family, shape: str) -> str:
    ip = addresses(of).map(format_address)
    port = st.builds("{}:{}".format, st.sampled_from(["tcp", "udp", "sctp", "47"]), st.integers(0, 65535))
    parts = {"ip": ip, "port": port, "net": nets(of)}
    return ",".join(draw(parts[kind]) for kind in shape.split(","))


@st.composite
def nets(draw: st.DrawFn, of: Family) -> str:
    least = V4_BITS if of is Family.IPV4 else 0
    text = format_network(network(draw(addresses(of)), draw(st.integers(least + 1, 128))))
    return text.removesuffix("/32" if of is Family.IPV4 else "/128")


@given(st.sampled_from(Family), st.sampled_from(sorted(messages.TYPES)), st.data())
def test_members_are_decoded_as_they_were_encoded(of: Family, type_: str, data: st.DataObject) -> None:
    shape = type_.partition(":")[2]
    some = st.integers(0, 65535).map(str) if type_ == "bitmap:port" else members(of, shape)
    wanted = data.draw(st.lists(some))
    made = IpSet("S", type_, of)
    raw = b"".join(messages.describe_member(made, member) for member in wanted)
    assert messages.read_members(raw, type_) == wanted


@pytest.mark.parametrize(
    ("type_", "member"),
    [
        ("hash:ip", ""),
        ("hash:ip", "10.0.0.1,tcp:80"),
        ("hash:ip", "fd00::1"),
        ("hash:ip", "10.0.0.0/8"),
        ("hash:ip,port", "10.0.0.1"),
        ("hash:ip,port", "10.0.0.1,tcp"),
        ("hash:ip,port", "10.0.0.1,tcp:"),
        ("hash:ip,port", "10.0.0.1,tcp:-1"),
        ("hash:ip,port", "10.0.0.1,tcp:65536"),
        ("hash:ip,port", "10.0.0.1,pigeon:1"),
        ("hash:ip,port", "10.0.0.1,256:1"),
        ("hash:ip,port,ip", "10.0.0.1,tcp:1,fd00::1"),
        ("hash:ip,port,net", "10.0.0.1,tcp:1,10.0.0.0/33"),
        ("hash:ip,port,net", "10.0.0.1,tcp:1,fd00::/8"),
        ("bitmap:port", "tcp:80"),
        ("bitmap:port", "65536"),
    ],
)
def test_a_member_that_does_not_fit_the_type_is_rejected(type_: str, member: str) -> None:
    with pytest.raises(ValueError):
        messages.describe_member(IpSet("S", type_, Family.IPV4), member)
