"""How errors of pyroute2 are converted, without requests to the kernel."""

import errno

import pytest
from pyroute2.netlink.exceptions import NetlinkError

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.netlink import iproute


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENODEV, NotFound),
        (errno.ENOENT, NotFound),
        (errno.EEXIST, AlreadyExists),
        (errno.EOPNOTSUPP, Unsupported),
        (errno.EINVAL, Rejected),
        (errno.EPERM, Rejected),
    ],
)
def test_a_rejection_becomes_our_error_with_the_action_and_the_kernels_text(
    number: int, kind: type[KernelError]
) -> None:
    with pytest.raises(kind) as raised, iproute.opened("cannot do it to n0"):
        raise NetlinkError(number, "Filter block is shared")
    assert raised.value.message == "cannot do it to n0: Filter block is shared"
    assert type(raised.value) is kind
    assert ("CAP_NET_ADMIN" in raised.value.hint) == (number == errno.EPERM)


def test_a_failure_of_the_socket_becomes_our_error_too() -> None:
    with pytest.raises(Rejected, match="cannot do it: No buffer space"), iproute.opened("cannot do it"):
        raise OSError(errno.ENOBUFS, "No buffer space available")


def test_a_missing_device_is_named_by_its_number() -> None:
    assert iproute.device_name(1) == "lo"
    assert iproute.exists(1)
    for gone in (0, 2**31 - 1, 2**40):
        assert iproute.device_name(gone) == f"device number {gone}"
        assert not iproute.exists(gone)
