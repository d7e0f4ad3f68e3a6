"""Which cookie stands for the node, on kernels that tell it and on those that do not."""

from pathlib import Path

import pytest

from ebpfproxy.errors import Rejected, Unsupported
from ebpfproxy.kernel import netns


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc whose process 1 has a network namespace of its own."""
    (tmp_path / "1/ns").mkdir(parents=True)
    (tmp_path / "1/ns/net").touch()
    return tmp_path


@pytest.fixture
def initial(tmp_path: Path) -> Path:
    """A /proc whose process 1 is in our network namespace."""
    (tmp_path / "1/ns").mkdir(parents=True)
    (tmp_path / "1/ns/net").symlink_to("/proc/thread-self/ns/net")
    return tmp_path


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel from before 5.14."""

    def cookie() -> int:
        raise Unsupported("this kernel has no SO_NETNS_COOKIE (Linux 5.14)")

    monkeypatch.setattr(netns, "cookie", cookie)


def test_a_kernel_that_tells_the_cookie_is_believed_in_any_namespace(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netns, "cookie", lambda: 4711)
    assert netns.cookie_or_initial(proc) == 4711


@pytest.mark.usefixtures("untold")
def test_an_older_kernel_in_the_initial_namespace_gives_0(initial: Path) -> None:
    assert netns.cookie_or_initial(initial) == 0


@pytest.mark.usefixtures("untold")
def test_an_older_kernel_in_another_namespace_is_unsupported_and_says_what_to_do(proc: Path) -> None:
    with pytest.raises(Unsupported, match=r"5\.14.*not the initial network namespace") as caught:
        netns.cookie_or_initial(proc)
    assert "hostNetwork" in caught.value.hint


@pytest.mark.usefixtures("untold")
def test_an_older_kernel_whose_process_1_cannot_be_seen_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="1/ns/net cannot be looked at: No such file"):
        netns.cookie_or_initial(tmp_path)


def test_an_error_of_another_kind_is_not_taken_for_an_older_kernel(
    initial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cookie() -> int:
        raise Rejected("SO_NETNS_COOKIE: Operation not permitted")

    monkeypatch.setattr(netns, "cookie", cookie)
    with pytest.raises(Rejected):
        netns.cookie_or_initial(initial)
