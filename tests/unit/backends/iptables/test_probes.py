"""The findings of a machine that lacks features for mode iptables."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from ebpfproxy.backends.iptables import packet_counters, probes
from ebpfproxy.backends.iptables.probes import probe
from ebpfproxy.errors import Rejected, Unsupported
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables import iptables
from ebpfproxy.linux.xtables.iptables import Iptables, LinesRejected, ToolBackend
from ebpfproxy.model.address import Family

Lacking = Callable[..., None]


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Lacking:
    """Install tools of the backend nft for these families, which reject rules that contain one of these
    words.
    """

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
        monkeypatch.setattr(packet_counters, "prepare", lambda family: None)

    return made


def is_usable() -> bool:
    return all(each.present or not each.needed for each in probe())


def missing() -> dict[str, bool]:
    """Return the missing features, each with whether it is needed."""
    return {each.feature: each.needed for each in probe() if not each.present}


def test_without_rejected_rules_nothing_is_missing(lacking: Lacking) -> None:
    lacking()
    assert missing() == {}
    assert is_usable()


def test_without_a_tool_the_remedy_names_what_to_install(lacking: Lacking) -> None:
    lacking(families=())
    (finding,) = probe()
    assert finding.needed
    assert "apt-get install iptables" in finding.remedy


def test_only_the_rejected_kind_of_rule_is_missing(lacking: Lacking) -> None:
    lacking("statistic")
    assert missing() == {"random choice (iptables-nft)": True, "random choice (ip6tables-nft)": True}
    assert not is_usable()


def test_without_rarely_needed_features_the_mode_is_usable(lacking: Lacking) -> None:
    lacking("sctp", "recent", "nfacct")
    assert set(missing().values()) == {False}
    assert is_usable()
    limitations = [finding.missing for finding in probe() if finding.feature.startswith("SCTP")]
    assert limitations == ["ports with the protocol SCTP are not served"] * 2


@pytest.mark.parametrize("served", Family)
def test_a_machine_that_lacks_one_family_serves_the_other(served: Family, lacking: Lacking) -> None:
    lacking(families=(served,))
    (other,) = set(Family) - {served}
    assert missing() == {f"iptables for {other.value}": False}
    assert is_usable()


def test_needed_features_come_first(lacking: Lacking) -> None:
    lacking("sctp")
    needed = [finding.needed for finding in probe()]
    assert needed == sorted(needed, reverse=True)


def test_every_kind_of_rule_is_tried_separately() -> None:
    assert len({sort.rule for sort in probes._RULE_KINDS}) == len(probes._RULE_KINDS)


def test_the_mode_is_usable_if_no_network_namespace_can_be_created(
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
