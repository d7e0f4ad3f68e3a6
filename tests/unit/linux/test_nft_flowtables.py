"""Flowtables as messages, and what the kernel reports of them."""

from ebpfproxy.linux.netlink.netlink import attributes
from ebpfproxy.linux.nft import flowtables
from ebpfproxy.linux.nft.encoding import name, nested, u32
from ebpfproxy.linux.nft.flowtables import DECLARATION, ListedFlowtable
from ebpfproxy.linux.nft.messages import Kind, Operation, Table

TABLE = Table("ip6", "kube-proxy")


def reported(operation: Operation) -> ListedFlowtable:
    return flowtables.read_flowtable(bytes(4) + operation.body)


def test_a_flowtable_is_reported_with_its_devices() -> None:
    added = flowtables.add_flowtable(TABLE, "services", ["eth0", "veth1"])
    assert (added.kind, added.family) == (Kind.NEW_FLOWTABLE, TABLE.number)
    assert reported(added) == ListedFlowtable("services", DECLARATION, ("eth0", "veth1"))
    assert reported(flowtables.add_flowtable(TABLE, "services")).devices == ()


def test_a_flowtable_of_another_form_is_recognized() -> None:
    """Another priority, and no counter."""
    hook = nested(3, u32(1, 0), u32(2, 10), nested(3, name(1, "eth0")))
    body = name(1, "kube-proxy") + name(2, "services")
    assert flowtables.read_flowtable(bytes(4) + body + hook + u32(7, 2)).declaration == ""
    hook = nested(3, u32(1, 0), u32(2, 0), nested(3, name(1, "eth0")))
    assert flowtables.read_flowtable(bytes(4) + body + hook) == ListedFlowtable("services", "", ("eth0",))


def test_a_pattern_that_another_program_added_is_no_device() -> None:
    """NFTA_DEVICE_PREFIX."""
    hook = nested(3, u32(1, 0), u32(2, 0), nested(3, name(2, "veth"), name(1, "eth0")))
    assert flowtables.read_flowtable(bytes(4) + name(2, "services") + hook).devices == ("eth0",)


def test_a_device_is_deleted_without_the_flowtable() -> None:
    of_device, all_ = (
        flowtables.delete_device(TABLE, "services", "eth0"),
        flowtables.delete_flowtable(TABLE, "services"),
    )
    assert of_device.kind == all_.kind == Kind.DELETE_FLOWTABLE
    assert dict(attributes(of_device.body, 0)).keys() - dict(attributes(all_.body, 0)).keys() == {3}
