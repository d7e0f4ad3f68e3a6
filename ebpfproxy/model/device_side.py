"""What is wrong with a classifier at one side of one device."""

from typing import NamedTuple


class DeviceSide(NamedTuple):
    """`side` is "ingress" or "egress". `before`: programs and filters that see a packet before ebpfproxy's
    program does, in running order; what they do with packets is not known.

    `contested`: ebpfproxy got its program to the first place, and lost that again to `before` at once.
    `unreached`: packets pass the device, and none of them reached ebpfproxy's program.
    """

    device: str
    side: str
    before: tuple[str, ...] = ()
    contested: bool = False
    unreached: bool = False

    @property
    def position(self) -> int:
        """Of ebpfproxy's program; 1 is the first."""
        return len(self.before) + 1

    @property
    def is_bypassed(self) -> bool:
        """Whether packets pass without ebpfproxy, as far as the agent can know."""
        return self.contested or self.unreached
