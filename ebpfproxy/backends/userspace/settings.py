"""The settings of relays, as options have them."""

from ebpfproxy.backends.userspace.entries import UserspaceSettings, one_per_cpu
from ebpfproxy.config import Config

_DEFAULT = UserspaceSettings()


def userspace_settings(config: Config) -> UserspaceSettings:
    """Return the settings of the relays of an agent with these options."""
    unreplied = config.conntrack_udp_timeout or _DEFAULT.udp_unreplied_timeout
    return UserspaceSettings(
        relays=config.userspace_relays or one_per_cpu(),
        tcp_timeout=config.conntrack_tcp_timeout_established or _DEFAULT.tcp_timeout,
        tcp_closing_timeout=config.conntrack_tcp_timeout_close_wait or _DEFAULT.tcp_closing_timeout,
        udp_timeout=config.udp_timeout,
        udp_unreplied_timeout=max(unreplied, config.udp_timeout),
        udp_flows=config.userspace_udp_flows_max,
        affinity_clients=config.userspace_affinity_max,
    )
