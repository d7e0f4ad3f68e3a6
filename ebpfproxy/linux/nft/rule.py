"""Rules of nf_tables as values, which are compared by their digests."""

import hashlib
from typing import NamedTuple

from ebpfproxy.linux.nft.encoding import encode_all
from ebpfproxy.linux.nft.expressions import Expression
from ebpfproxy.linux.nft.statements import AnonymousSet, Outside, Statement, Verdict

DIGEST_BYTES = 8


class Identity(NamedTuple):
    """What a rule is compared by.

    `digest`: of its expressions, sets and comment; b"" for a rule that ebpfproxy did not write. `target`: the
    chain that it jumps to, "" if none. The kernel reports its present name, even if another program renamed
    it.
    """

    digest: bytes
    target: str


class Rule:
    """A rule. One that was read from the kernel has an identity, but no statements.

    Two rules are equal if their identities are. The kernel never changes a rule, it only replaces one by
    another, and the userdata with it, which have the digest. So a rule with a digest is as it was written,
    except for the names of chains.
    """

    __slots__ = ("_identity", "comment", "problem", "statements")

    def __init__(self, *statements: Statement, comment: str = "", identity: Identity | None = None) -> None:
        self.statements = statements
        self.comment = comment
        self.problem = ""
        """Which value of a statement is invalid. It is known after the identity was computed."""
        self._identity = identity

    @property
    def identity(self) -> Identity:
        """Computed once. A rule with an invalid value differs from all in the kernel."""
        if self._identity is None:
            targets = [each.chain for each in self.statements if isinstance(each, Verdict)]
            digest = hashlib.blake2b(self._content(), digest_size=DIGEST_BYTES).digest()
            self._identity = Identity(digest, targets[0] if targets else "")
        return self._identity

    def _content(self) -> bytes:
        try:
            content = encode_all(self.expressions()) + self.comment.encode()
            return content + b"".join(element.key for own in self.sets() for element in own.elements)
        except ValueError as failure:
            self.problem = f"invalid rule {str(self)!r}: {failure}"
            return self.problem.encode()

    def expressions(self) -> tuple[Expression, ...]:
        """Raises ValueError if a statement has an invalid value."""
        return tuple(part for each in self.statements for part in each.expressions())

    def sets(self) -> tuple[AnonymousSet, ...]:
        """The anonymous sets. An expression that uses the first of them has the `set_id` 1, and so on."""
        return tuple(each.own_set() for each in self.statements if isinstance(each, Outside))

    def __str__(self) -> str:
        if not self.statements:
            return f"rule {self.identity.digest.hex() or 'of another program'}"
        text = " ".join(map(str, self.statements))
        return f'{text} comment "{self.comment}"' if self.comment else text

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return self.identity == other.identity if isinstance(other, Rule) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.identity)
