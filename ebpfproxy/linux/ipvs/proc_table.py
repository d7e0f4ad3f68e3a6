"""/proc/net/ip_vs: all real servers of all virtual servers in one reading.

By netlink they are to be asked for one virtual server at a time. What it does not tell, such as flags and
netmasks, is with the virtual servers, which netlink lists in one dump.

Source: ip_vs_info_seq_show() in net/netfilter/ipvs/ip_vs_ctl.c; it has been the same since Linux 2.6.28.
"""

from collections.abc import Mapping
from pathlib import Path

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.ipvs.messages import Connections, Forwarding, RealServer, ServerKey
from ebpfproxy.model.address import V4_PREFIX, Address, Protocol

_PATH = Path("/proc/thread-self/net/ip_vs")
_HEADLINES = 3
_ARROW = b"->"
_PROTOCOLS = {protocol.name.encode(): protocol for protocol in Protocol}
_METHODS = {
    b"Masq": Forwarding.MASQUERADE,
    b"Local": Forwarding.LOCAL,
    b"Tunnel": Forwarding.TUNNEL,
    b"Route": Forwarding.DIRECT,
    b"Bypass": Forwarding.BYPASS,
}
_COUNTERS = 21  # bytes at the end of a real server's line: "%-10d %-10d"


def read() -> bytes:
    """The table as the kernel writes it; b"" where there is no IPVS, or it is not loaded. Raises Rejected."""
    try:
        with _PATH.open("rb", buffering=0) as opened:
            return opened.readall()
    except FileNotFoundError:
        return b""
    except OSError as failure:
        raise Rejected(f"cannot read {_PATH}: {failure.strerror}", "run as root") from failure


def real_servers(table: bytes) -> dict[ServerKey, Mapping[RealServer, Connections]]:
    """By virtual server; those of one by firewall mark are left out."""
    found: dict[ServerKey, Mapping[RealServer, Connections]] = {}
    reals: dict[RealServer, Connections] = {}
    for line in table.splitlines()[_HEADLINES:]:
        words = line.split()
        if words[0] == _ARROW:
            _, place, method, weight, active, inactive = words
            real = RealServer(*_parse_place(place), int(weight), _METHODS[method])
            reals[real] = Connections(int(active), int(inactive))
        else:
            reals = {}
            if words[0] in _PROTOCOLS:
                found[ServerKey(*_parse_place(words[1]), _PROTOCOLS[words[0]])] = reals
    return found


def without_counters(table: bytes) -> bytes:
    """What does not change with connections."""
    return b"\n".join([line[:-_COUNTERS] if line[:1] == b" " else line for line in table.splitlines()])


def _parse_place(text: bytes) -> tuple[Address, int]:
    """Such as 0A600001:0050, or [fd00:0000:…:0001]:0050."""
    address, _, port = text.rpartition(b":")
    if address[:1] == b"[":
        return Address(bytes.fromhex(address[1:-1].replace(b":", b"").decode())), int(port, 16)
    return Address(V4_PREFIX + bytes.fromhex(address.decode())), int(port, 16)
