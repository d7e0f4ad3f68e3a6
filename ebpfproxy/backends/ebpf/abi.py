"""The layouts of bpf/abi.h, parsed from that file, so that there is no second copy to maintain.

The parser supports only the plain declarations that abi.h uses. Anything else is an error at import.
"""

import re
import struct
from pathlib import Path
from typing import NamedTuple

_SCALARS = {"__u8": "B", "__u16": "H", "__u32": "I", "__u64": "Q", "__be16": "H", "__be32": "I", "char": "s"}
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_DEFINE = re.compile(r"^#define (\w+)\s+(\d+)$", re.MULTILINE)
_BLOCK = re.compile(r"(struct|enum) (\w+) \{(.*?)\};", re.DOTALL)
_FIELD = re.compile(r"(struct )?(\w+) (\w+)(?:\[(\w+)\])?")
_ENUMERATOR = re.compile(r"(\w+)\s*=\s*(\d+)")
_ENUMERATORS = re.compile(rf"(\s*{_ENUMERATOR.pattern},)*\s*")


class Field(NamedTuple):
    """`offset` and `size` are in bytes. `format` is that of the struct module, without byte order."""

    name: str
    offset: int
    size: int
    format: str


class Layout:
    """A C struct. `pack` takes one value per field, in the order of `fields`, including nested structs and
    `pad`.

    Nested structs and char arrays are bytes. Fields of type __be16 are packed unchanged: convert them with
    socket.htons first.
    """

    def __init__(self, name: str, fields: tuple[Field, ...], alignment: int, shape: str = "") -> None:
        """`shape`: each field by name, offset and type, with nested structs expanded.

        Two structs of the same shape have the same meaning. A field whose meaning changes gets another name.
        """
        self.name = name
        self.fields = fields
        self.alignment = alignment
        self.shape = shape
        self._struct = struct.Struct("=" + "".join(field.format for field in fields))
        self.size = self._struct.size
        self.pack = self._struct.pack
        self.unpack = self._struct.unpack
        self.pack_into = self._struct.pack_into
        self.unpack_from = self._struct.unpack_from
        self.iter_unpack = self._struct.iter_unpack

    def offset(self, field: str) -> int:
        return next(f.offset for f in self.fields if f.name == field)


class Abi(NamedTuple):
    layouts: dict[str, Layout]
    constants: dict[str, int]


def parse(text: str) -> Abi:
    """Parse the text of abi.h. Raises ValueError for unsupported declarations and for implicit padding."""
    text = _COMMENT.sub("", text)
    constants = {name: int(value) for name, value in _DEFINE.findall(text)}
    layouts: dict[str, Layout] = {}
    rest = _BLOCK.sub("", _DEFINE.sub("", text)).replace("#pragma once", "").split()
    if rest:
        raise ValueError(f"cannot read {' '.join(rest)!r}")
    for kind, name, body in _BLOCK.findall(text):
        if kind == "enum":
            if not _ENUMERATORS.fullmatch(body):
                raise ValueError(f"enum {name}: cannot read {body!r}")
            constants |= {key: int(value) for key, value in _ENUMERATOR.findall(body)}
        else:
            layouts[name] = _layout(name, body, layouts, constants)
    return Abi(layouts, constants)


def _layout(name: str, body: str, known: dict[str, Layout], constants: dict[str, int]) -> Layout:
    fields: list[Field] = []
    shape: list[str] = []
    offset, widest = 0, 1
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        match = _FIELD.fullmatch(declaration)
        nested, type_, field, length = match.groups() if match else (None, "", "", None)
        if type_ not in (known if nested else _SCALARS):
            raise ValueError(f"struct {name}: cannot read {declaration!r}")
        n = 1 if length is None else int(constants.get(length, length))
        alignment = known[type_].alignment if nested else struct.calcsize(_SCALARS[type_])
        size = (known[type_].size if nested else alignment) * n
        plain = not nested and length is None
        format_ = _SCALARS[type_] if plain else f"{size}s"
        if offset % alignment:
            raise ValueError(f"struct {name}: implicit padding before {field}")
        fields.append(Field(field, offset, size, format_))
        shape.append(f"{field}@{offset}:{known[type_].shape if nested else type_}*{n}")
        offset += size
        widest = max(widest, alignment)
    if offset % widest:
        raise ValueError(f"struct {name}: implicit padding at its end")
    return Layout(name, tuple(fields), widest, f"{{{' '.join(shape)}}}")


def source_directory() -> Path:
    """The folder of the C sources: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "bpf"
    return installed if installed.is_dir() else package.parent / "bpf"


_ABI = parse((source_directory() / "abi.h").read_text())

CONSTANTS = _ABI.constants
LAYOUTS = _ABI.layouts

SERVICE_KEY = LAYOUTS["service_key"]
SERVICE = LAYOUTS["service"]
SERVICE_NAME = LAYOUTS["service_name"]
ENDPOINT = LAYOUTS["endpoint"]
SLOT_RANGE = LAYOUTS["slot_range"]
FRONTEND_ADDRESS = LAYOUTS["frontend_address"]
POD_NAMESPACE = LAYOUTS["pod_namespace"]
AFFINITY_KEY = LAYOUTS["affinity_key"]
AFFINITY = LAYOUTS["affinity"]
SOCKET_PEER = LAYOUTS["socket_peer"]
SOCKET_FLOW_KEY = LAYOUTS["socket_flow_key"]
SOCKET_FLOW = LAYOUTS["socket_flow"]
NETWORK_KEY = LAYOUTS["network_key"]
SOURCE_RANGE_KEY = LAYOUTS["source_range_key"]
NODE = LAYOUTS["node"]
DEVICE = LAYOUTS["device"]
SOURCE_KEY = LAYOUTS["source_key"]
XDP_DEVICE = LAYOUTS["xdp_device"]
FLOW_KEY = LAYOUTS["flow_key"]
FLOW = LAYOUTS["flow"]
REPLY = LAYOUTS["reply"]
PORT_USES = LAYOUTS["port_uses"]
ICMP_BUDGET = LAYOUTS["icmp_budget"]
FRAGMENT_KEY = LAYOUTS["fragment_key"]
FRAGMENT = LAYOUTS["fragment"]
EXHAUSTED = LAYOUTS["exhausted"]
TUNNEL = LAYOUTS["tunnel"]
TUNNEL_ENDPOINT = LAYOUTS["tunnel_endpoint"]
TUNNELED_FLOW = LAYOUTS["tunneled_flow"]
TUNNEL_OPTION = LAYOUTS["tunnel_option"]
TRAFFIC = LAYOUTS["traffic"]
EVENT = LAYOUTS["event"]
MONITOR = LAYOUTS["monitor"]

PLACEHOLDER_FLOWS = CONSTANTS["PLACEHOLDER_FLOWS"]
PLACEHOLDER_HALF_OPEN_ROWS = CONSTANTS["PLACEHOLDER_HALF_OPEN_ROWS"]
PLACEHOLDER_SOCKETS = CONSTANTS["PLACEHOLDER_SOCKETS"]
PLACEHOLDER_TRAFFIC = CONSTANTS["PLACEHOLDER_TRAFFIC"]

SERVICE_INTERNAL_LOCAL = CONSTANTS["SERVICE_INTERNAL_LOCAL"]
SERVICE_EXTERNAL_LOCAL = CONSTANTS["SERVICE_EXTERNAL_LOCAL"]
SERVICE_REJECT = CONSTANTS["SERVICE_REJECT"]
SERVICE_RESTRICTED = CONSTANTS["SERVICE_RESTRICTED"]
SERVICE_NODE_ADMITTED = CONSTANTS["SERVICE_NODE_ADMITTED"]
SERVICE_MASQUERADE_POD = CONSTANTS["SERVICE_MASQUERADE_POD"]
SERVICE_MASQUERADE_NODE = CONSTANTS["SERVICE_MASQUERADE_NODE"]
SERVICE_MASQUERADE_OUTSIDE = CONSTANTS["SERVICE_MASQUERADE_OUTSIDE"]
SERVICE_DSR = CONSTANTS["SERVICE_DSR"]
ALGORITHM_RANDOM = CONSTANTS["ALGORITHM_RANDOM"]
ALGORITHM_ROUND_ROBIN = CONSTANTS["ALGORITHM_ROUND_ROBIN"]
ALGORITHM_SOURCE_HASH = CONSTANTS["ALGORITHM_SOURCE_HASH"]
ALGORITHM_MAGLEV = CONSTANTS["ALGORITHM_MAGLEV"]
ALGORITHM_LEAST_CONNECTIONS = CONSTANTS["ALGORITHM_LEAST_CONNECTIONS"]
PING_FROM_INSIDE = CONSTANTS["PING_FROM_INSIDE"]
PING_FROM_OUTSIDE = CONSTANTS["PING_FROM_OUTSIDE"]
PING_TO_CLUSTER_IP = CONSTANTS["PING_TO_CLUSTER_IP"]
ENDPOINT_LISTED = CONSTANTS["ENDPOINT_LISTED"]
ENDPOINT_CLUSTER = CONSTANTS["ENDPOINT_CLUSTER"]
ENDPOINT_LOCAL = CONSTANTS["ENDPOINT_LOCAL"]
ENDPOINT_ON_NODE = CONSTANTS["ENDPOINT_ON_NODE"]
NETWORK_LOCAL = CONSTANTS["NETWORK_LOCAL"]
NETWORK_FOREIGN = CONSTANTS["NETWORK_FOREIGN"]
NETWORK_NODE_PORTS = CONSTANTS["NETWORK_NODE_PORTS"]
NETWORK_OF_NODE = CONSTANTS["NETWORK_OF_NODE"]
NETWORK_SERVICE_CIDR = CONSTANTS["NETWORK_SERVICE_CIDR"]
NODE_SOCKETS_OF_PODS = CONSTANTS["NODE_SOCKETS_OF_PODS"]
NODE_REDIRECT = CONSTANTS["NODE_REDIRECT"]
NODE_NETFILTER_FLOWS = CONSTANTS["NODE_NETFILTER_FLOWS"]
NODE_STALE_SOCKETS = CONSTANTS["NODE_STALE_SOCKETS"]
DEVICE_SLOTS = CONSTANTS["DEVICE_SLOTS"]
DEVICE_POD = CONSTANTS["DEVICE_POD"]
DEVICE_LAYER3 = CONSTANTS["DEVICE_LAYER3"]
DEVICE_CLSACT = CONSTANTS["DEVICE_CLSACT"]
DEVICE_PEER = CONSTANTS["DEVICE_PEER"]
DEVICE_SWITCHED = CONSTANTS["DEVICE_SWITCHED"]
DEVICE_SOURCES = CONSTANTS["DEVICE_SOURCES"]
SOURCE_OF_NEXT_HOP = CONSTANTS["SOURCE_OF_NEXT_HOP"]
SOURCE_OF_DESTINATION = CONSTANTS["SOURCE_OF_DESTINATION"]
DEVICE_GUEST = CONSTANTS["DEVICE_GUEST"]
XDP_SENDS_BACK = CONSTANTS["XDP_SENDS_BACK"]
XDP_SENDS = CONSTANTS["XDP_SENDS"]
DEVICE_TUNNEL = CONSTANTS["DEVICE_TUNNEL"]
TUNNEL_OVERHEAD = CONSTANTS["TUNNEL_OVERHEAD"]
AT_INGRESS = CONSTANTS["AT_INGRESS"]
AT_EGRESS = CONSTANTS["AT_EGRESS"]
MASQUERADED = CONSTANTS["MASQUERADED"]
FLOW_MASQUERADE = CONSTANTS["FLOW_MASQUERADE"]
FLOW_NODE = CONSTANTS["FLOW_NODE"]
FLOW_REPLIED = CONSTANTS["FLOW_REPLIED"]
FLOW_CLIENT_FIN = CONSTANTS["FLOW_CLIENT_FIN"]
FLOW_ENDPOINT_FIN = CONSTANTS["FLOW_ENDPOINT_FIN"]
FLOW_RESET = CONSTANTS["FLOW_RESET"]
FLOW_REDIRECT = CONSTANTS["FLOW_REDIRECT"]
FLOW_DIRECT = CONSTANTS["FLOW_DIRECT"]
FLOW_STALE_SOCKET = CONSTANTS["FLOW_STALE_SOCKET"]
FLOW_DSR = CONSTANTS["FLOW_DSR"]
FLOWS_OF_TCP = CONSTANTS["FLOWS_OF_TCP"]
FLOWS_OF_OTHERS = CONSTANTS["FLOWS_OF_OTHERS"]
SOCKET_WAYS = CONSTANTS["SOCKET_WAYS"]
NO_ENDPOINT = CONSTANTS["NO_ENDPOINT"]
TO_ENDPOINT = CONSTANTS["TO_ENDPOINT"]
TO_FRONTEND = CONSTANTS["TO_FRONTEND"]
CLIENT_ADDRESS, CLIENT_NETNS = CONSTANTS["CLIENT_ADDRESS"], CONSTANTS["CLIENT_NETNS"]
KINDS = {
    CONSTANTS["KIND_CLUSTER_IP"]: "ClusterIP",
    CONSTANTS["KIND_NODE_PORT"]: "NodePort",
    CONSTANTS["KIND_EXTERNAL_IP"]: "ExternalIP",
    CONSTANTS["KIND_LOAD_BALANCER"]: "LoadBalancer",
}
ALGORITHMS = {
    value: name.removeprefix("ALGORITHM_").lower().replace("_", "-")
    for name, value in CONSTANTS.items()
    if name.startswith("ALGORITHM_")
}
COUNTERS = {
    value: name.removeprefix("COUNTER_").lower()
    for name, value in CONSTANTS.items()
    if name.startswith("COUNTER_")
}
