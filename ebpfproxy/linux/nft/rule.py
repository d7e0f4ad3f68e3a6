"""Rules of nf_tables: their text in the syntax of nft(8), which is compared by its digest."""

import functools
import hashlib
import re

DIGEST_BYTES = 8

_CONVERSION = b"1"
"""Part of each digest. Change it if `rule_expressions` converts a text into other expressions than before:
then the agent replaces rules that were written before.
"""

_TARGET = re.compile(r"\b(?:jump|goto) (\S+)")
_REMEMBERS = re.compile(r"\bupdate @\S+ \{ .* offset ([0-9]+) timeout ")


class Rule:
    """A rule. One that was read from the kernel has a digest, a target and `remembers`, but no text.

    Two rules are equal if these three are. The kernel never changes a rule, it only replaces
    one by another, and the userdata with it, which have the digest. So a rule with a digest is as it was
    written, except for the names of chains.
    """

    __slots__ = ("digest", "remembers", "target", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = _digest(text)
        """b"" for a rule that ebpfproxy did not write."""
        found = _TARGET.search(text.partition(" comment ")[0])
        self.target = found[1] if found else ""
        """The chain that the rule jumps to, "" if none. The kernel reports its present name, even if another
        program renamed it."""
        found = _REMEMBERS.search(text) if "update" in text else None
        self.remembers = int(found[1]) if found else None
        """The number that the rule adds clients with to a set; None if it adds none."""

    @classmethod
    def listed(cls, digest: bytes, target: str, remembers: int | None) -> "Rule":
        """Return a rule that was read from the kernel."""
        rule = cls.__new__(cls)
        rule.text, rule.digest, rule.target, rule.remembers = "", digest, target, remembers
        return rule

    def __str__(self) -> str:
        return self.text or f"rule {self.digest.hex() or 'of another program'}"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rule):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[bytes, str, int | None]:
        return self.digest, self.target, self.remembers


@functools.lru_cache(maxsize=1024)
def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode() + _CONVERSION, digest_size=DIGEST_BYTES).digest()
