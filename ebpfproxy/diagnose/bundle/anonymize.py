"""Replaces addresses and names by others, in the same way everywhere. Pure.

Addresses keep the structure of networks: two addresses with a common prefix have one afterwards, too (the
principle of Crypto-PAn, Xu et al. 2002). The first 8 bits of an IPv4 address and the first 16 of an IPv6
address stay, so that private, loopback and link-local addresses can be recognized.
"""

import functools
import hashlib
import hmac
import json
import re
from collections.abc import Iterable
from typing import Any

from ebpfproxy.model.address import (
    V4_BITS,
    Address,
    Family,
    Network,
    family,
    format_address,
    format_network,
    parse_address,
    parse_network,
)

_ADDRESS = re.compile(
    r"(?<![\w.:-])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:\.\d{1,3}){0,3})"
    r"(?:/\d{1,3})?(?![\w.]*\w:|\w)"
)
_KEPT = {Family.IPV4: 8, Family.IPV6: 16}
_SPECIAL = ("127.", "0.", "169.", "255.", "fe80:", "::")
"""Beginnings of addresses that stay. They are as long as the prefixes that stay in all addresses."""
_PUBLIC_NAMES = frozenset(
    {"", "default", "kube-system", "kubernetes", "localhost", "ebpfproxy", "kube-proxy"}
)
_NAMES = ("service", "node")
"""Members of a JSON object whose value is a name, also if the name is another word."""
_LOGGED = re.compile(
    r"\b(?:service|slice|node|pod|namespace|served|rejected|names?)=\"?([\w.-]+(?:/[\w.-]+)?)"
)


class Anonymizer:
    """Replaces addresses and names. `key`: random, so that other bundles cannot be compared with this one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._names: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.address = functools.lru_cache(maxsize=65536)(self._address)

    def learn(self, names: Iterable[str]) -> None:
        """Replace these names from now on. Each is a name, "namespace/name" or "namespace/name:port"."""
        for name in names:
            parts = name.partition(":")[0].split("/")
            self._names.update(part for part in parts if part not in _PUBLIC_NAMES and not part.isdigit())
        self._pattern = None

    def learn_from_log(self, text: str) -> None:
        """Replace the names in a log from now on."""
        self.learn(_LOGGED.findall(text))

    def name(self, name: str) -> str:
        """Replace "namespace/name:port" or a part of it. Port names stay, and so do well-known names.

        >>> Anonymizer(b"").name("default/kubernetes:https")
        'default/kubernetes:https'
        """
        head, colon, port = name.partition(":")
        return "/".join(map(self._name, head.split("/"))) + colon + port

    def _name(self, part: str) -> str:
        return (
            part
            if part in _PUBLIC_NAMES or part.startswith("?")
            else f"n{self._digest(part.encode()).hex()[:8]}"
        )

    def text(self, text: str) -> str:
        """Replace addresses, and the names that are known."""
        text = _ADDRESS.sub(self._replace_address, text)
        if self._names:
            if self._pattern is None:
                longest_first = sorted(self._names, key=lambda name: (-len(name), name))
                names = "|".join(map(re.escape, longest_first))
                self._pattern = re.compile(rf"(?<![\w.])(?:{names})(?![\w])")
            text = self._pattern.sub(lambda match: self._name(match[0]), text)
        return text

    def json(self, text: str) -> str:
        """Replace addresses and names in the values of JSON. Names of members stay.

        In members that are names, every name is replaced. In others, only addresses are: a Service may be
        named as a word of the format. Raises ValueError.
        """
        return json.dumps(self._value(json.loads(text), ""), indent=2) + "\n"

    def _value(self, value: Any, member: str) -> Any:
        if isinstance(value, dict):
            return {key: self._value(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [self._value(each, member) for each in value]
        if not isinstance(value, str):
            return value
        if member in _NAMES:
            return self.name(value)
        return _ADDRESS.sub(self._replace_address, value) if member != "ebpfproxy" else value

    def _replace_address(self, match: re.Match[str]) -> str:
        found = match[0]
        try:
            if "/" in found:
                return format_network(self._network(parse_network(found)))
            return format_address(self.address(parse_address(found)))
        except ValueError:
            return found

    def _network(self, net: Network) -> Network:
        replaced = int.from_bytes(self.address(net.address)) >> (128 - net.length) << (128 - net.length)
        return Network(Address(replaced.to_bytes(16)), net.length)

    def _address(self, address: Address) -> Address:
        """Keep loopback, unspecified and link-local addresses and all that begin as they do. Flip each bit of
        others depending on those before it."""
        of = family(address)
        if format_address(address).startswith(_SPECIAL):
            return address
        start = V4_BITS + _KEPT[of] if of is Family.IPV4 else _KEPT[of]
        bits = int.from_bytes(address)
        result = bits >> (128 - start)
        for at in range(start, 128):
            before = bits >> (128 - at)
            flip = self._digest(at.to_bytes() + before.to_bytes(16))[0] & 1
            result = result << 1 | (bits >> (127 - at) & 1) ^ flip
        return Address(result.to_bytes(16))

    def _digest(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, hashlib.sha256)
