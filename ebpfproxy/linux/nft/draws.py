"""How rules draw a number for a packet."""

import enum

from ebpfproxy.linux.nft.expressions import Expression, Hash, Numgen, Payload

HASH_SEED = 0x65627066
"""The same on all nodes. Without a seed, the kernel selects one at random for each rule."""

_INCREMENTAL, _RANDOM = 0, 1  # NFT_NG_*


class Draw(enum.Enum):
    """How a number less than a modulus is drawn.

    - RANDOM: by chance.
    - IN_TURN: the number after that of the rule's previous packet. A new rule begins with 0.
    - BY_SOURCE: a hash of the source address.
    """

    RANDOM = "random"
    IN_TURN = "inc"
    BY_SOURCE = "jhash"

    __hash__ = object.__hash__  # faster than Enum.__hash__, which is written in Python

    def text(self, family: str, modulus: int) -> str:
        """Return the expression of nft. `family` is "ip" or "ip6".

        >>> Draw.BY_SOURCE.text("ip", 2)
        'jhash ip saddr mod 2 seed 0x65627066'
        """
        if self is Draw.BY_SOURCE:
            return f"jhash {family} saddr mod {modulus} seed 0x{HASH_SEED:x}"
        return f"numgen {self.value} mod {modulus}"

    def expressions(self, source: Payload, slot: int, modulus: int) -> tuple[Expression, ...]:
        """Return the expressions that store the number in a slot. `source` loads the source address."""
        if self is Draw.BY_SOURCE:
            return source, Hash(source.slot, slot, source.length, modulus, HASH_SEED)
        return (Numgen(slot, modulus, _INCREMENTAL if self is Draw.IN_TURN else _RANDOM, 0),)
