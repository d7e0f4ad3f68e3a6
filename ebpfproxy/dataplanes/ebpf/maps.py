"""The maps of bpf/maps.h: opened by their pins, their shapes checked, and their sizes."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.errors import AbiMismatch
from ebpfproxy.kernel.bpf import Map

_U32, _ADDRESS = 4, 16
_HALF_OPEN_PART, _HALF_OPEN_MIN = 8, 4096
"""Half-open flows have an eighth of the room of established ones. With the default that is 32 768: a flood
takes at most half of the ports by which one endpoint can be reached."""
_SHAPES = {
    "services": (abi.SERVICE_KEY.size, abi.SERVICE.size),
    "service_names": (_U32, abi.SERVICE_NAME.size),
    "slots": (_U32, _U32),
    "endpoints": (_U32, abi.ENDPOINT.size),
    "node": (_U32, abi.NODE.size),
    "local_networks": (abi.NETWORK_KEY.size, _U32),
    "affinity": (abi.AFFINITY_KEY.size, abi.AFFINITY.size),
    "socket_peers": (_U32, abi.SOCKET_PEER.size),
    "socket_flows": (abi.SOCKET_FLOW_KEY.size, abi.SOCKET_FLOW.size),
    "counters": (_U32, 8),
    "device_packets": (_U32, 8),
    "source_ranges": (abi.SOURCE_RANGE_KEY.size, _U32),
    "service_ports": (_U32, 8),
    "frontend_addresses": (_ADDRESS, _U32),
    "devices": (_U32, abi.DEVICE.size),
    "bypassing": (_U32, 8),
    "flows": (abi.FLOW_KEY.size, abi.FLOW.size),
    "replies": (abi.FLOW_KEY.size, abi.REPLY.size),
    "half_open_flows": (abi.FLOW_KEY.size, abi.FLOW.size),
    "half_open_replies": (abi.FLOW_KEY.size, abi.REPLY.size),
    "flow_ports": (_U32, abi.PORT_USES.size),
    "exhausted_ports": (abi.FLOW_KEY.size, _U32),
    "former_flows": (_U32, _U32),
    "former_replies": (_U32, _U32),
    "former_half_open_flows": (_U32, _U32),
    "former_half_open_replies": (_U32, _U32),
    "icmp_budget": (_U32, abi.ICMP_BUDGET.size),
    "netfilter_flows": (abi.FLOW_KEY.size, _U32),
    "fragments": (abi.FRAGMENT_KEY.size, abi.FRAGMENT.size),
    "traffic": (_U32, abi.TRAFFIC.size),
}


@dataclasses.dataclass(frozen=True, slots=True)
class MapSizes:
    """How many entries the maps have room for. Each field has an option --ebpf-NAME-max."""

    services: int = 65536
    slots: int = 1048576
    endpoints: int = 262144
    affinity: int = 65536
    sockets: int = 262144
    flows: int = 262144
    source_ranges: int = 65536

    def defines(self) -> dict[str, str]:
        """As maps.h wants them from the compiler's command line."""
        sizes = dataclasses.asdict(self) | {"half_open": max(self.flows // _HALF_OPEN_PART, _HALF_OPEN_MIN)}
        return {f"{name.upper()}_MAX": str(value) for name, value in sizes.items()}


class Maps:
    """Every map, open. Close with `close`."""

    def __init__(self, directory: Path) -> None:
        """Open those pinned in `directory`. Raises NotFound, and AbiMismatch for one of another shape."""
        self._maps: dict[str, Map] = {}
        try:
            for name, shape in _SHAPES.items():
                opened = self._maps[name] = Map.pinned(directory / name)
                if (opened.shape.key_size, opened.shape.value_size) != shape:
                    raise AbiMismatch(
                        f"{directory / name} has keys of {opened.shape.key_size} and values of "
                        f"{opened.shape.value_size} bytes, not {shape[0]} and {shape[1]}",
                        "somebody else pinned it there: run `ebpfproxy cleanup`, then start again",
                    )
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Map:
        return self._maps[name]

    def __iter__(self) -> Iterator[Map]:
        return iter(self._maps.values())

    def close(self) -> None:
        for opened in self._maps.values():
            opened.close()


def is_complete(directory: Path) -> bool:
    """Whether all maps are pinned there."""
    return all((directory / name).exists() for name in _SHAPES)
