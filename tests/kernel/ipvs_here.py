"""Mode ipvs is the one that a kernel may lack: few of containers have it; tests/vm has others."""

import pytest

from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.ipvs import ipvs


def lacks_ipvs() -> str:
    """What this kernel has not; "" where it has all."""
    try:
        ipvs.available()
    except Unsupported as lack:
        return lack.message
    return ""


def skip_without_ipvs(mode: str) -> None:
    """Where the mode is that one, and the kernel lacks it."""
    if mode == "ipvs" and (lack := lacks_ipvs()):
        pytest.skip(lack)
