"""Rules of nf_tables as values, which are compared by their digests."""

import hashlib
from typing import NamedTuple

from ebpfproxy.linux.nft.encoding import encode_all
from ebpfproxy.linux.nft.expressions import Expression
from ebpfproxy.linux.nft.statements import AnonymousSet, Outside, Remember, Statement, Verdict

DIGEST_BYTES = 8


class Rule:
    """A rule. One that was read from the kernel has a digest, a target and `remembers`, but no statements.

    Two rules are equal if these three are. The kernel never changes a rule, it only replaces
    one by another, and the userdata with it, which have the digest. So a rule with a digest is as it was
    written, except for the names of chains.
    """

    __slots__ = ("_digest", "comment", "remembers", "statements", "target")

    def __init__(self, *statements: Statement, comment: str = "") -> None:
        self.statements = statements
        self.comment = comment
        self.target = next((each.chain for each in statements if isinstance(each, Verdict)), "")
        """The chain that the rule jumps to, "" if none. The kernel reports its present name, even if another
        program renamed it."""
        self.remembers = next((each.number for each in statements if isinstance(each, Remember)), None)
        """The number that the rule adds clients with to a set; None if it adds none."""
        self._digest: bytes | None = None

    @classmethod
    def listed(cls, digest: bytes, target: str, remembers: int | None) -> "Rule":
        """Return a rule that was read from the kernel."""
        rule = cls()
        rule.target, rule.remembers, rule._digest = target, remembers, digest
        return rule

    @property
    def digest(self) -> bytes:
        """The digest of its expressions, sets and comment; b"" for a rule that ebpfproxy did not write.

        Computed once. A rule with an invalid value differs from all in the kernel.
        """
        if self._digest is None:
            try:
                self._digest = self._encode()[1]
            except ValueError as failure:
                self._digest = _digest_of(str(failure).encode())
        return self._digest

    def encoded(self) -> "EncodedRule":
        """Encode the rule. Raises ValueError with the rule and its invalid value.

        The digest is computed, too: a new rule is encoded once for both.
        """
        expressions, self._digest = self._encode()
        return EncodedRule(self, expressions)

    def _encode(self) -> tuple[bytes, bytes]:
        """Return the encoded expressions, and the digest. Raises ValueError."""
        try:
            expressions = encode_all(self.expressions())
            elements = [element.key for own in self.sets() for element in own.elements]
        except ValueError as failure:
            raise ValueError(f"invalid rule {str(self)!r}: {failure}") from failure
        return expressions, _digest_of(b"".join((expressions, self.comment.encode(), *elements)))

    def expressions(self) -> tuple[Expression, ...]:
        """Raises ValueError if a statement has an invalid value."""
        return tuple(part for each in self.statements for part in each.expressions())

    def sets(self) -> tuple[AnonymousSet, ...]:
        """The anonymous sets. An expression that uses the first of them has the `set_id` 1, and so on."""
        return tuple(each.own_set() for each in self.statements if isinstance(each, Outside))

    def __str__(self) -> str:
        if not self.statements:
            return f"rule {self.digest.hex() or 'of another program'}"
        text = " ".join(map(str, self.statements))
        return f'{text} comment "{self.comment}"' if self.comment else text

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rule):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[bytes, str, int | None]:
        return self.digest, self.target, self.remembers


class EncodedRule(NamedTuple):
    """A rule, and the value of NFTA_RULE_EXPRESSIONS, with the numbers of `Rule.sets`."""

    rule: Rule
    expressions: bytes


def _digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
