"""Schedulers that a kernel has."""

import pytest

from ebpfproxy.backends.ipvs.prerequisites import has_scheduler
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.ipvs import ipvs


@pytest.mark.parametrize(
    ("name", "found"), [("wlc", True), ("mh", False), ("a-name-that-is-too-long", False)]
)
def test_a_scheduler_is_found_if_the_kernel_accepts_it(
    name: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(scheduler: str) -> None:
        if scheduler != "wlc":
            raise Unsupported(f"no scheduler {scheduler}")

    monkeypatch.setattr(ipvs, "probe_scheduler", probe)
    assert has_scheduler(name) is found
