"""The modes that benchmarks compare: each of --proxy-mode, and variants of some.

What is added to `modes.choice.MODES` is a name here by that alone.
"""

from collections.abc import Iterable

from ebpfproxy.backends import selection
from ebpfproxy.errors import ConfigError

NONE = "none"
"""A machine without a proxy, which modes are measured beside."""

EBPF = "ebpf"

_VARIANTS = {
    # A bench that names devices would leave out those of pods, by which replies skip the stack.
    "ebpf-redirect": (EBPF, ("--ebpf-redirect", "--tc-devices=eth0,veth*")),
    "ebpf-host": (EBPF, ("--socket-lb=host",)),
    "iptables-legacy": ("iptables", ("--iptables-backend=legacy",)),
    "iptables-nft": ("iptables", ("--iptables-backend=nft",)),
}
"""By name: the mode, and the agent's flags that make it this variant."""

NAMES = tuple(
    name
    for mode in selection.MODES
    for name in (mode.name, *(variant for variant, (of, _) in _VARIANTS.items() if of == mode.name))
)


def base(name: str) -> str:
    """The --proxy-mode of one of NAMES.

    >>> base("iptables-legacy"), base("nftables")
    ('iptables', 'nftables')
    """
    return _VARIANTS[name][0] if name in _VARIANTS else name


def options(name: str) -> tuple[str, ...]:
    """The flags of an agent beside --proxy-mode."""
    return _VARIANTS[name][1] if name in _VARIANTS else ()


def flags(name: str) -> tuple[str, ...]:
    """All that makes an agent serve in one of NAMES.

    >>> flags("iptables-legacy")
    ('--proxy-mode=iptables', '--iptables-backend=legacy')
    """
    return (f"--proxy-mode={base(name)}", *options(name))


def options_of_one_life(names: Iterable[str]) -> list[str]:
    """The flags of an agent that switches from each to the next, since it keeps its flags.

    Raises ConfigError where two of them are variants of one mode.
    """
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(base(name), name)
        if other != name:
            raise ConfigError(
                f"an agent cannot move between {other} and {name}, which differ in its flags",
                "name one of them",
            )
    return [option for name in found.values() for option in options(name)]
