"""Types of options: parsers for the text of a flag or of a field of the file.

The syntax is that of Go's flags (spf13/pflag), which kube-proxy uses. Every `parse` raises ValueError with a
text that continues a line such as ``--sync-period: ...``.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.model.address import (
    Network,
    format_address,
    network_family,
    parse_address,
    parse_network,
)
from ebpfproxy.model.balancing import ALGORITHM_NAMES, Algorithm, EbpfForwarding, parse_algorithm
from ebpfproxy.plan.service_plan import DetectLocal, Protection, Role, SocketLb


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The type of an option.

    `metavar` is the placeholder for the value in the help. A `many` kind is parsed from a list of texts. A
    `boolean` flag without a value means true. In a file, a `boolean` or a `number` has no quotes.

    Shells complete `words`, which are all or some values. `path` is "file" or "dir" if the value is a path.
    """

    metavar: str
    parse: Callable[[Any], Any]
    many: bool = False
    boolean: bool = False
    number: bool = False
    words: tuple[str, ...] = ()
    path: str = ""


class NodePortAddresses(NamedTuple):
    """The addresses on which NodePorts answer: those in `networks`, and with `primary` the node's primary
    address of each family. Every local address if neither is given.
    """

    networks: tuple[Network, ...] = ()
    primary: bool = False


_NAMED_NETWORKS = {"all": ("0.0.0.0/0", "::/0"), "localhost": ("127.0.0.0/8", "::1/128")}
_TRUE = {"1", "t", "T", "TRUE", "true", "True"}
_FALSE = {"0", "f", "F", "FALSE", "false", "False"}
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_LONGEST_TIMEOUT = 2**31 - 1
_LONGEST_DURATION = (2**63 - 1) / 1e9  # the maximum of Go's time.Duration, which is in nanoseconds
_PATTERN = re.compile(r"[^\s/]+")  # roughly the characters that dev_valid_name() in net/core/dev.c accepts
_DEVICE_NAME = re.compile(r"""[^\s/:"'\\*]+""")  # ... without those that rules cannot contain
_LONGEST_DEVICE_NAME = 15  # bytes: IFNAMSIZ without the NUL
_WITH_PORT = re.compile(r"(?:\[([^\]]*:[^\]]*)\]|([0-9.]+)):([0-9]{1,5})", re.ASCII)
_DURATION = re.compile(rf"[-+]?(?:{_PART.pattern})+")


def parse_boolean(text: str) -> bool:
    """Parse a boolean as Go's strconv.ParseBool.

    >>> parse_boolean("T"), parse_boolean("0")
    (True, False)
    """
    if text not in _TRUE | _FALSE:
        raise ValueError(f'"{text}" is neither true nor false')
    return text in _TRUE


def parse_duration(text: str) -> float:
    """Parse a Go time.Duration; return seconds.

    >>> parse_duration("1m30s"), parse_duration("250ms"), parse_duration("0")
    (90.0, 0.25, 0.0)
    """
    if text in ("0", "+0", "-0"):
        return 0.0
    if not _DURATION.fullmatch(text):
        raise ValueError(f'"{text}" is not a duration such as 30s, 1m30s or 1h')
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if seconds > _LONGEST_DURATION:
        raise ValueError(f"{text} is longer than 292 years")
    return -seconds if text.startswith("-") else seconds


def parse_timeout(text: str) -> int:
    """Parse a duration that is not negative; return whole seconds, rounded up.

    >>> parse_timeout("24h"), parse_timeout("100ms"), parse_timeout("0s")
    (86400, 1, 0)
    """
    seconds = math.ceil(parse_duration(text))
    if not 0 <= seconds <= _LONGEST_TIMEOUT or text.startswith("-"):
        raise ValueError(f"{text} is not between 0 and {_LONGEST_TIMEOUT}s")
    return seconds


def parse_integer(text: str) -> int:
    if not re.fullmatch(r"[-+]?[0-9]{1,18}", text, re.ASCII):
        raise ValueError(f'"{text}" is not a whole number')
    return int(text)


def parse_path(text: str) -> Path | None:
    """Return the path; None for the empty text."""
    return Path(text) if text else None


def parse_absolute_path(text: str) -> Path:
    if not text.startswith("/"):
        raise ValueError(f'"{text}" is not an absolute path')
    return Path(text)


def parse_listen_address(text: str) -> str:
    """Check an IP address with or without a port, or the empty text; return it as written.

    >>> parse_listen_address("[::1]:10249"), parse_listen_address("::1"), parse_listen_address("")
    ('[::1]:10249', '::1', '')
    """
    if text:
        split_listen_address(text, 1)
    return text


def split_listen_address(text: str, port: int) -> tuple[str, int]:
    """Return address and port of `text`; `port` is the default.

    >>> split_listen_address("0.0.0.0", 10256), split_listen_address("[::]:80", 10256)
    (('0.0.0.0', 10256), ('::', 80))
    """
    match = _WITH_PORT.fullmatch(text)
    host, digits = (match[1] or match[2], match[3]) if match else (text, None)
    try:
        address = parse_address(host)
    except ValueError:
        raise ValueError(f'"{text}" is not an IP address with or without a port') from None
    number = port if digits is None else int(digits)
    if not 1 <= number <= 65535:
        raise ValueError(f'the port of "{text}" is not between 1 and 65535')
    return format_address(address), number


def split_words(texts: Sequence[str]) -> list[str]:
    """Split the texts at commas and strip blanks. Empty words are dropped.

    >>> split_words(["a, b,", "c"])
    ['a', 'b', 'c']
    """
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


def parse_node_port_addresses(texts: Sequence[str]) -> NodePortAddresses:
    """Parse CIDRs and the words that kube-proxy 1.37 accepts besides them. Raises ValueError.

    The words are NodePortAddressesPrimary and others in pkg/proxy/apis/config/types.go.

    >>> parse_node_port_addresses(["primary"])
    NodePortAddresses(networks=(), primary=True)
    """
    words = split_words(texts)
    cidrs = [cidr for word in words if word != "primary" for cidr in _NAMED_NETWORKS.get(word, (word,))]
    return NodePortAddresses(tuple(map(parse_network, cidrs)), "primary" in words)


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Parse CIDRs separated by commas, in any number of texts. Raises ValueError."""
    return tuple(parse_network(word) for word in split_words(texts))


def parse_namespace_networks(texts: Sequence[str]) -> tuple[tuple[str, Network], ...]:
    """Parse networks of namespaces. "*" is every namespace. Raises ValueError.

    >>> [name for name, _ in parse_namespace_networks(["*=203.0.113.0/24, team=2001:db8::/64"])]
    ['*', 'team']
    """
    found = []
    for word in split_words(texts):
        name, equals, network = (part.strip() for part in word.partition("="))
        if not (name and equals):
            raise ValueError(f'"{word}" is not NAMESPACE=CIDR, such as team=203.0.113.0/24')
        found.append((name, parse_network(network)))
    return tuple(found)


def parse_feature_gates(texts: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """Parse feature gates, each with its value; the last value of a gate counts.

    >>> parse_feature_gates(["A=true, B=false,", "A=0"])
    (('A', False), ('B', False))
    """
    gates = {}
    for word in split_words(texts):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals):
            raise ValueError(f'"{word}" is not a feature gate with its value, such as A=true')
        try:
            gates[name] = parse_boolean(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return tuple(gates.items())


def parse_device_patterns(texts: Sequence[str]) -> tuple[str, ...]:
    """Parse device names or shell patterns for them. Only "none" means no device.

    >>> parse_device_patterns(["eth*, bond0", "wg[0-9]"])
    ('eth*', 'bond0', 'wg[0-9]')
    """
    words = split_words(texts)
    for word in words:
        if not _PATTERN.fullmatch(word):
            raise ValueError(f'"{word}" is not a pattern for device names: remove blanks and /')
    if "none" in words and len(words) > 1:
        raise ValueError('"none" excludes other patterns; for a device of that name write "[n]one"')
    return tuple(words)


def parse_device_name(text: str) -> str:
    """Check a device name, a prefix of one, or the empty text."""
    fits = len(text.encode(errors="replace")) <= _LONGEST_DEVICE_NAME
    if text and not (fits and _DEVICE_NAME.fullmatch(text)):
        raise ValueError(
            f'"{text}" is not a device name: use 1 to 15 characters without blanks, quotes and / : * \\'
        )
    return text


def parse_cluster_cidrs(text: str) -> tuple[Network, ...]:
    """Parse at most one CIDR of each family, separated by a comma.

    >>> [str(cidr) for cidr in parse_cluster_cidrs("10.244.0.0/16,fd00:10:244::/56")]
    ['10.244.0.0/16', 'fd00:10:244::/56']
    """
    cidrs = tuple(map(parse_network, text.split(","))) if text else ()
    if len(set(map(network_family, cidrs))) < len(cidrs):
        raise ValueError(f'"{text}" has more than one CIDR of a family; give at most one of each')
    return cidrs


def parse_detect_local(text: str) -> DetectLocal:
    return DetectLocal(_DETECT_LOCAL.parse(text))


def parse_socket_lb(text: str) -> SocketLb:
    return SocketLb(_SOCKET_LB.parse(text))


def parse_role(text: str) -> Role:
    return Role(_ROLE.parse(text))


def parse_protection(text: str) -> Protection:
    return Protection(_PROTECTION.parse(text))


def parse_ebpf_forwarding(text: str) -> EbpfForwarding:
    return EbpfForwarding(_EBPF_FORWARDING.parse(text))


def parse_node_name(text: str) -> str:
    if text and not text.strip():
        raise ValueError("the node name is blank; give a name, or leave it out to use the host name")
    return text


def one_of(*words: str) -> Kind:
    """Return the kind of these words. The empty text means the first one."""

    def parse(text: str) -> str:
        if text and text not in words:
            raise ValueError(f'"{text}" is not one of {", ".join(words)}')
        return text or words[0]

    return Kind("|".join(words), parse, words=words)


def integer(minimum: int, maximum: int) -> Kind:
    """Return the kind of whole numbers in a range, both ends included."""

    def parse(text: str) -> int:
        number = parse_integer(text)
        if not minimum <= number <= maximum:
            raise ValueError(f"{number} is not between {minimum} and {maximum}")
        return number

    return Kind("N", parse, number=True)


def duration(*, zero: bool) -> Kind:
    """Return the kind of durations that are not negative; without `zero`, 0 is invalid, too."""

    def parse(text: str) -> float:
        seconds = parse_duration(text)
        if seconds < 0 or (seconds == 0 and not zero):
            raise ValueError(f"{text} must be {'0 or more' if zero else 'more than 0'}")
        return seconds

    return Kind("DURATION", parse)


def parse_percentage(text: str) -> int:
    """Parse a whole number from 0 to 100. Raises ValueError."""
    return int(PERCENTAGE.parse(text))


def parse_lb_algorithm(text: str) -> Algorithm | None:
    """Parse the name of an algorithm; None for the empty text."""
    return parse_algorithm(text) if text else None


_SOCKET_LB = one_of("on", "host", "off")
_ROLE = one_of("node", "edge")
_PROTECTION = one_of(*(each.value for each in Protection))
_EBPF_FORWARDING = one_of(*(each.value for each in EbpfForwarding))
_DETECT_LOCAL = one_of("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix")

BOOLEAN = Kind("", parse_boolean, boolean=True)
TEXT = Kind("TEXT", str)
NODE_NAME = Kind("NAME", parse_node_name)
PATH = Kind("PATH", parse_path, path="file")
ABSOLUTE_PATH = Kind("DIR", parse_absolute_path, path="dir")
OPTIONAL_DIRECTORY = Kind("DIR", lambda text: parse_absolute_path(text) if text else None, path="dir")
DIRECTORY = Kind("DIR", parse_path, path="dir")
IP = Kind("IP", parse_address)
LISTEN_ADDRESS = Kind("IP[:PORT]", parse_listen_address)
NODE_PORT_ADDRESSES = Kind(
    "CIDR|primary|localhost|all,...",
    parse_node_port_addresses,
    many=True,
    words=("primary", *_NAMED_NETWORKS),
)
NETWORKS = Kind("CIDR,...", parse_networks, many=True)
NAMESPACE_NETWORKS = Kind("NAMESPACE=CIDR,...", parse_namespace_networks, many=True)
FEATURE_GATES = Kind("NAME=true|false,...", parse_feature_gates, many=True)
DEVICE_PATTERNS = Kind("PATTERN,...", parse_device_patterns, many=True)
DEVICE_NAME = Kind("NAME", parse_device_name)
CLUSTER_CIDRS = Kind("CIDR[,CIDR]", parse_cluster_cidrs)
DETECT_LOCAL = dataclasses.replace(_DETECT_LOCAL, parse=parse_detect_local)
EBPF_FORWARDING = dataclasses.replace(_EBPF_FORWARDING, parse=parse_ebpf_forwarding)
PROTECTION = dataclasses.replace(_PROTECTION, parse=parse_protection)
SOCKET_LB = dataclasses.replace(_SOCKET_LB, parse=parse_socket_lb)
ROLE = dataclasses.replace(_ROLE, parse=parse_role)
LB_ALGORITHM = Kind("NAME", parse_lb_algorithm, words=ALGORITHM_NAMES)
TIMEOUT = Kind("DURATION", parse_timeout)
PERCENTAGE = integer(0, 100)
PORT = integer(0, 65535)
ENTRIES = integer(1, 1 << 26)
ENTRIES_OR_ZERO = integer(0, 1 << 26)
COUNT = integer(0, 2**31 - 1)
