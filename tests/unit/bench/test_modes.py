"""Which modes are compared, and what agents are told so that they serve in them."""

import pytest
from click.testing import CliRunner

from ebpfproxy.backends import selection
from ebpfproxy.bench import modes, sides
from ebpfproxy.cli.bench import command
from ebpfproxy.errors import ConfigError


def test_every_mode_that_an_agent_knows_can_be_compared() -> None:
    assert {mode.name for mode in selection.MODES} <= set(modes.NAMES)


def test_every_variant_is_of_such_a_mode() -> None:
    assert {modes.base(name) for name in modes.NAMES} == {mode.name for mode in selection.MODES}
    assert len({modes.flags(name) for name in modes.NAMES}) == len(modes.NAMES)


def test_an_agent_that_moves_is_told_the_variants_of_all_its_modes() -> None:
    assert modes.options_of_one_life(["ebpf", "iptables-legacy", "nftables", "ebpf"]) == [
        "--iptables-backend=legacy"
    ]


def test_an_agent_cannot_move_between_variants_of_one_mode() -> None:
    with pytest.raises(ConfigError, match="iptables-legacy and iptables-nft"):
        modes.options_of_one_life(["iptables-legacy", "ebpf", "iptables-nft"])


@pytest.mark.parametrize("bench", ["connect", "nodeport", "packet", "overhead", "flows", "sync"])
@pytest.mark.parametrize(
    ("given", "why"), [("ebpf,tc", "'tc' is not one of"), ("ebpf,ebpf", "named only once")]
)
def test_what_cannot_be_compared_is_a_usage_error(bench: str, given: str, why: str) -> None:
    done = CliRunner().invoke(command, [bench, "--modes", given])
    assert done.exit_code == 2
    assert why in done.output


def test_sides_take_turns_at_each_part_and_another_one_begins_each_time() -> None:
    order = list(sides.turns(["a", "b"], 2, ["connect", "crr", "rr"], lambda text: None))
    assert [side for _, _, side in order] == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert [turn for turn, _, _ in order] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [part for _, part, _ in order[::2]] == ["connect", "crr", "rr"] * 2
