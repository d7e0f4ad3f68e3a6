"""/proc/net/ip_vs: the real servers of all virtual servers in one read.

Netlink lists real servers for one virtual server at a time. This table lacks flags and netmasks, but those
are properties of the virtual servers, which netlink lists in one dump.

Source: ip_vs_info_seq_show() in net/netfilter/ipvs/ip_vs_ctl.c, unchanged since Linux 2.6.28.
"""

from collections.abc import Mapping
from pathlib import Path

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.ipvs.messages import Connections, Method, RealServer, ServerKey
from ebpfproxy.model.address import V4_PREFIX, Address, Protocol

_PATH = Path("/proc/thread-self/net/ip_vs")
_HEADER_LINES = 3
_ARROW = b"->"
_PROTOCOLS = {protocol.name.encode(): protocol for protocol in Protocol}
_METHODS = {
    b"Masq": Method.MASQUERADE,
    b"Local": Method.LOCAL,
    b"Tunnel": Method.TUNNEL,
    b"Route": Method.DIRECT,
    b"Bypass": Method.BYPASS,
}
_COUNTERS = 21  # bytes at the end of a real server's line: "%-10d %-10d"


def read() -> bytes:
    """The text of the table; b"" if the kernel has no IPVS or it is not loaded. Raises Rejected."""
    try:
        with _PATH.open("rb", buffering=0) as opened:
            return opened.readall()
    except FileNotFoundError:
        return b""
    except OSError as failure:
        raise Rejected(f"cannot read {_PATH}: {failure.strerror}", "run as root") from failure


def real_servers(table: bytes) -> dict[ServerKey, Mapping[RealServer, Connections]]:
    """The real servers, by virtual server. Virtual servers by firewall mark are skipped."""
    found: dict[ServerKey, Mapping[RealServer, Connections]] = {}
    reals: dict[RealServer, Connections] = {}
    for line in table.splitlines()[_HEADER_LINES:]:
        words = line.split()
        if words[0] == _ARROW:
            _, endpoint, method, weight, active, inactive = words
            real = RealServer(*_parse_endpoint(endpoint), int(weight), _METHODS[method])
            reals[real] = Connections(int(active), int(inactive))
        else:
            reals = {}
            if words[0] in _PROTOCOLS:
                found[ServerKey(*_parse_endpoint(words[1]), _PROTOCOLS[words[0]])] = reals
    return found


def without_counters(table: bytes) -> bytes:
    """The table without the connection counters of real servers."""
    return b"\n".join([line[:-_COUNTERS] if line[:1] == b" " else line for line in table.splitlines()])


def _parse_endpoint(text: bytes) -> tuple[Address, int]:
    """Address and port from text such as 0A600001:0050 or [fd00:0000:…:0001]:0050."""
    address, _, port = text.rpartition(b":")
    if address[:1] == b"[":
        return Address(bytes.fromhex(address[1:-1].replace(b":", b"").decode())), int(port, 16)
    return Address(V4_PREFIX + bytes.fromhex(address.decode())), int(port, 16)
