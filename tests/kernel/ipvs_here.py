"""Whether this kernel has IPVS, which many kernels of container hosts lack; tests/vm runs other kernels."""

import pytest

from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.ipvs import ipvs


def lacks_ipvs() -> str:
    """The reason why mode ipvs cannot run; "" if it can."""
    try:
        ipvs.available()
    except Unsupported as unsupported:
        return unsupported.message
    return ""


def skip_without_ipvs(mode: str) -> None:
    """Skip the test if the mode is ipvs and the kernel does not support it."""
    if mode == "ipvs" and (reason := lacks_ipvs()):
        pytest.skip(reason)
