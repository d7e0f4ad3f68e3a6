"""Whether a machine can have a flowtable, and what the mode does on one that cannot."""

import contextlib
import errno
from collections.abc import Iterator, Sequence

import pytest

from ebpfproxy.backends.nftables import flowtables, mode
from ebpfproxy.config import Config
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.nft import tool
from ebpfproxy.linux.nft.messages import Operation
from ebpfproxy.linux.nft.nft import Rejection
from ebpfproxy.linux.nft.tool import Version

NEW: Version = (6, 12, 0)


class FakeSession:
    def __init__(self, *rejections: Rejection) -> None:
        self.rejections = list(rejections)

    def attempt(self, operations: Sequence[Operation]) -> list[Rejection]:
        assert operations
        return self.rejections


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    flowtables.probe.cache_clear()
    yield
    flowtables.probe.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, version: Version, *rejections: Rejection) -> None:
    session = FakeSession(*rejections)
    monkeypatch.setattr(flowtables, "Session", lambda: contextlib.nullcontext(session))
    monkeypatch.setattr(tool, "linux", lambda: version)


def test_a_kernel_without_flowtables_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, NEW, Rejection(1, errno.EOPNOTSUPP, ""))
    found = flowtables.probe()
    assert (found.present, found.needed, found.failure) == (False, False, errno.EOPNOTSUPP)
    assert found.modules == ("nf_flow_table", "nf_flow_table_inet", "nft_flow_offload")


def test_a_kernel_that_cannot_end_offloaded_flows_gets_no_flowtable(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, (6, 3, 9))
    assert "cannot end flows" in flowtables.probe().missing
    flowtables.probe.cache_clear()
    on(monkeypatch, (6, 4, 0))
    assert flowtables.probe().present


def test_a_failure_to_ask_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise Unsupported("cannot access nf_tables: Operation not permitted", "run as root")

    monkeypatch.setattr(flowtables, "Session", fail)
    assert str(flowtables.probe()).startswith("flowtables: cannot access nf_tables")


def test_the_mode_works_without_a_flowtable_that_the_kernel_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Config.parse({"nftables_flowtable_devices": ("eth*",)})
    on(monkeypatch, NEW)
    assert mode.nftables_settings(wanted).flowtable
    assert not mode.nftables_settings(Config()).flowtable
    flowtables.probe.cache_clear()
    on(monkeypatch, NEW, Rejection(1, errno.EOPNOTSUPP, ""))
    assert not mode.nftables_settings(wanted).flowtable
    assert flowtables.FEATURE in [each.feature for each in mode.NftablesMode().probe(wanted)]
