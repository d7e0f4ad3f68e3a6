"""The modes that benchmarks compare: those of --proxy-mode, and variants of some with other flags.

Modes come from `backends.selection.MODES`, so that a new mode needs no change here.
"""

from collections.abc import Iterable

from ebpfproxy.backends import selection
from ebpfproxy.errors import ConfigError
from ebpfproxy.linux.netlink import geneve

NONE = "none"
"""The baseline: no proxy."""

EBPF = "ebpf"

DSR_PORT = geneve.PORT
"""The port that Nodes must announce for ebpf-dsr."""

_VARIANTS = {
    # A benchmark that sets --tc-devices leaves out pod devices. With --ebpf-redirect, replies skip the stack
    # on them, and with --socket-lb=host, connections of pods need programs on them.
    "ebpf-redirect": (EBPF, ("--ebpf-redirect", "--tc-devices=eth0,veth*")),
    "ebpf-xdp": (EBPF, ("--ebpf-redirect", "--ebpf-xdp=native", "--tc-devices=eth0,veth*")),
    "ebpf-xdp-generic": (EBPF, ("--ebpf-redirect", "--ebpf-xdp=generic", "--tc-devices=eth0,veth*")),
    "ebpf-dsr": (EBPF, ("--ebpf-forwarding=dsr", f"--ebpf-dsr-port={DSR_PORT}")),
    "ebpf-host": (EBPF, ("--socket-lb=host", "--tc-devices=eth0,veth*")),
    # The second link of a node, eth1, leads to pods directly, without a Service.
    "nftables-flowtable": ("nftables", ("--nftables-flowtable-devices=eth*,veth*",)),
    "iptables-legacy": ("iptables", ("--iptables-backend=legacy",)),
    "iptables-nft": ("iptables", ("--iptables-backend=nft",)),
}
"""By name: the mode and the agent's flags of the variant."""

NAMES = tuple(
    name
    for mode in selection.MODES
    for name in (mode.name, *(variant for variant, (of, _) in _VARIANTS.items() if of == mode.name))
)


def base(name: str) -> str:
    """Return the --proxy-mode of one of NAMES.

    >>> base("iptables-legacy"), base("nftables")
    ('iptables', 'nftables')
    """
    return _VARIANTS[name][0] if name in _VARIANTS else name


def options(name: str) -> tuple[str, ...]:
    """Return the flags of a variant, without --proxy-mode."""
    return _VARIANTS[name][1] if name in _VARIANTS else ()


def flags(name: str) -> tuple[str, ...]:
    """Return all flags for an agent in one of NAMES.

    >>> flags("iptables-legacy")
    ('--proxy-mode=iptables', '--iptables-backend=legacy')
    """
    return (f"--proxy-mode={base(name)}", *options(name))


def options_for_switching(names: Iterable[str]) -> list[str]:
    """Return the flags of an agent that switches among these modes. A running agent keeps its flags.

    Raises ConfigError for two variants of one mode.
    """
    variants: dict[str, str] = {}
    for name in names:
        other = variants.setdefault(base(name), name)
        if other != name:
            raise ConfigError(
                f"--modes: an agent cannot switch between {other} and {name}, which differ in its flags",
                "name only one of them",
            )
    return [option for name in variants.values() for option in options(name)]
