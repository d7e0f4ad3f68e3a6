"""How rules draw a number for a packet."""

import enum

from ebpfproxy.linux.nft.jhash import jhash

HASH_SEED = 0x65627066
"""The same on all nodes. Without a seed, the kernel selects one at random for each rule."""

_WORD = 4  # bytes of a slot
_PORT = 2  # bytes of a port, which takes a slot


class Draw(enum.Enum):
    """How a number less than a modulus is drawn.

    - RANDOM: by chance.
    - IN_TURN: the number after that of the rule's previous packet. A new rule begins with 0.
    - BY_SOURCE: a hash of the source address.
    - BY_FLOW: a hash of the source address and port. The rule ends here for a packet without a port.
    """

    RANDOM = "random"
    IN_TURN = "inc"
    BY_SOURCE = "source"
    BY_FLOW = "flow"

    __hash__ = object.__hash__  # faster than Enum.__hash__, which is written in Python

    def text(self, family: str, modulus: int) -> str:
        """Return the expression of nft. `family` is "ip" or "ip6".

        >>> Draw.BY_SOURCE.text("ip", 2)
        'jhash ip saddr mod 2 seed 0x65627066'
        """
        if self in HASHES:
            port = " . th sport" if self is Draw.BY_FLOW else ""
            return f"jhash {family} saddr{port} mod {modulus} seed 0x{HASH_SEED:x}"
        return f"numgen {self.value} mod {modulus}"

    def number(self, source: bytes, port: int, modulus: int) -> int:
        """Return the number that a hash draws for a packet. Raises ValueError if no hash draws it.

        `source`: an address of 4 or 16 bytes. `port`: the source port.
        """
        if self not in HASHES:
            raise ValueError(f"{self.name} is no hash")
        data = source + port.to_bytes(_PORT).ljust(_WORD, b"\0") if self is Draw.BY_FLOW else source
        return jhash(data, modulus, HASH_SEED)


HASHES = frozenset((Draw.BY_SOURCE, Draw.BY_FLOW))
