"""The modes that can be compared, and the flags of their agents."""

import pytest
from click.testing import CliRunner

from ebpfproxy.backends import selection
from ebpfproxy.bench import modes, sides
from ebpfproxy.cli.bench import command
from ebpfproxy.errors import ConfigError


def test_every_mode_of_the_agent_can_be_compared() -> None:
    assert {mode.name for mode in selection.MODES} <= set(modes.NAMES)


def test_every_variant_belongs_to_a_mode_of_the_agent_and_has_distinct_flags() -> None:
    assert {modes.base(name) for name in modes.NAMES} == {mode.name for mode in selection.MODES}
    assert len({modes.flags(name) for name in modes.NAMES}) == len(modes.NAMES)


def test_an_agent_that_switches_modes_gets_the_flags_of_all_its_variants() -> None:
    assert modes.options_for_switching(["ebpf", "iptables-legacy", "nftables", "ebpf"]) == [
        "--iptables-backend=legacy"
    ]


def test_an_agent_cannot_switch_between_variants_of_one_mode() -> None:
    with pytest.raises(ConfigError, match="iptables-legacy and iptables-nft"):
        modes.options_for_switching(["iptables-legacy", "ebpf", "iptables-nft"])


@pytest.mark.parametrize("bench", ["connect", "nodeport", "packet", "sync"])
@pytest.mark.parametrize(
    ("given", "why"), [("ebpf,tc", "'tc' is not one of"), ("ebpf,ebpf", "named only once")]
)
def test_invalid_modes_are_a_usage_error(bench: str, given: str, why: str) -> None:
    done = CliRunner().invoke(command, [bench, "--modes", given])
    assert done.exit_code == 2
    assert why in done.output


def test_sides_alternate_in_each_part_and_another_one_begins_each_time() -> None:
    order = list(sides.turns(["a", "b"], 2, ["connect", "crr", "rr"], lambda text, done=None, /: None))
    assert [side for _, _, side in order] == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert [turn for turn, _, _ in order] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [part for _, part, _ in order[::2]] == ["connect", "crr", "rr"] * 2
