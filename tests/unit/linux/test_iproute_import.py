"""pyroute2 is imported in part, in new processes each."""

import subprocess
import sys

import pytest

CODE = """
import sys
{before}
from ebpfproxy.linux.netlink import iproute
with iproute.opened("cannot look") as changes:
    print(changes.link("get", index=1)[0].get("ifname"))
print(*sys.modules)
"""


def modules(before: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(before=before)], capture_output=True, text=True, check=True
    )
    loopback, *found = done.stdout.split()
    assert loopback == "lo"
    return found


def test_only_the_used_part_of_pyroute2_is_imported() -> None:
    """The complete package takes 5 MB more."""
    found = modules()
    assert "pyroute2.iproute" in found
    assert [name for name in ("pyroute2.ndb.main", "pyroute2.ipdb", "pyroute2.ipset") if name in found] == []


@pytest.mark.parametrize("before", ["import pyroute2", "sys.modules['pyroute2.iproute'] = None"])
def test_otherwise_the_complete_package_is_used(before: str) -> None:
    assert "pyroute2.ipset" in modules(before)
