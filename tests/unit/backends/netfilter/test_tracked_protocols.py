"""Which kernels cannot translate SCTP."""

from pathlib import Path

import pytest

from ebpfproxy.backends.netfilter.node_support import sctp_is_unserved
from ebpfproxy.linux import sysctl


@pytest.mark.parametrize(
    ("names", "unserved"),
    [
        ((), False),  # conntrack is not loaded yet
        (("nf_conntrack_max",), True),
        (("nf_conntrack_max", "nf_conntrack_sctp_timeout_established"), False),
    ],
)
def test_sctp_is_unserved_if_conntrack_has_no_timeout_for_it(
    names: tuple[str, ...], unserved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysctl, "ROOT", tmp_path)
    folder = tmp_path / "net" / "netfilter"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("1")
    assert bool(sctp_is_unserved()) is unserved
