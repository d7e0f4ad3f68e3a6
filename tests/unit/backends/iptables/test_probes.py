"""What is told where this machine lacks something."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from ebpfproxy.backends.iptables import probes
from ebpfproxy.backends.iptables.probes import probe
from ebpfproxy.errors import Rejected, Unsupported
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.linux.xtables.iptables import Iptables, LinesRejected, ToolBackend
from ebpfproxy.model.address import Family

Lacking = Callable[..., None]


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Lacking:
    """Have tools of the backend nft, for these families, that reject rules with one of these words."""

    def made(*words: str, families: tuple[Family, ...] = tuple(Family)) -> None:
        def find(family: Family, tool_backend: ToolBackend) -> Iptables:
            if family not in families or tool_backend is not ToolBackend.NFT:
                raise Unsupported(f"no iptables for {family.value}", "apt-get install iptables")
            return Iptables(family, tool_backend, "/nowhere", "1.8.9")

        def restore(tool: Iptables, text: str) -> None:
            if any(word in text for word in words):
                raise LinesRejected("refused line 3", {3: "no such thing"})

        @contextlib.contextmanager
        def throw_away() -> Iterator[None]:
            yield

        monkeypatch.setattr(iptables, "find", find)
        monkeypatch.setattr(Iptables, "restore", restore)
        monkeypatch.setattr(netns, "throw_away", throw_away)

    return made


def is_usable() -> bool:
    return all(each.present or not each.needed for each in probe())


def missing() -> dict[str, bool]:
    """What is, each with whether it is needed."""
    return {each.feature: each.needed for each in probe() if not each.present}


def test_where_nothing_is_refused_nothing_is_missing(lacking: Lacking) -> None:
    lacking()
    assert missing() == {}
    assert is_usable()


def test_without_a_tool_what_to_install_is_told(lacking: Lacking) -> None:
    lacking(families=())
    (finding,) = probe()
    assert finding.needed
    assert "apt-get install iptables" in finding.remedy


def test_what_is_refused_is_missing_and_nothing_else(lacking: Lacking) -> None:
    lacking("statistic")
    assert missing() == {"choice at random (iptables-nft)": True, "choice at random (ip6tables-nft)": True}
    assert not is_usable()


def test_without_a_thing_that_few_services_need_the_others_are_served(lacking: Lacking) -> None:
    lacking("sctp", "recent", "--random-fully")
    assert set(missing().values()) == {False}
    assert is_usable()
    told = [finding.missing for finding in probe() if finding.feature.startswith("SCTP")]
    assert told == ["ports with the protocol SCTP are not served"] * 2


@pytest.mark.parametrize("served", Family)
def test_a_machine_that_lacks_one_family_serves_the_other(served: Family, lacking: Lacking) -> None:
    lacking(families=(served,))
    (other,) = set(Family) - {served}
    assert missing() == {f"iptables for {other.value}": False}
    assert is_usable()


def test_what_is_needed_comes_first(lacking: Lacking) -> None:
    lacking("sctp")
    needed = [finding.needed for finding in probe()]
    assert needed == sorted(needed, reverse=True)


def test_every_sort_is_a_rule_of_its_own() -> None:
    assert len({sort.rule for sort in probes._SORTS}) == len(probes._SORTS)


def test_who_may_not_make_a_network_namespace_to_try_rules_in_may_serve_all_the_same(
    lacking: Lacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def rejected() -> Iterator[None]:
        raise Rejected(
            "cannot create a network namespace: Operation not permitted",
            "run with the capability CAP_SYS_ADMIN",
        )
        yield

    lacking()
    monkeypatch.setattr(netns, "throw_away", rejected)
    assert is_usable()
    assert set(missing().values()) == {False}
    assert all("cannot be tried" in each.missing and each.remedy for each in probe() if not each.present)
