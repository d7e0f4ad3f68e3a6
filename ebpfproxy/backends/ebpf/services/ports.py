"""The map `service_ports`: a bit for each protocol and port that a key of `services` has.

NodePorts, whose keys have the unspecified address, have separate bits. A packet to a port without a bit
belongs to no Service, and a program can skip the lookup in a hash map.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from mmap import mmap
from socket import IPPROTO_SCTP, IPPROTO_TCP, IPPROTO_UDP, ntohs

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, is_unspecified

_BITS = 64
_WORDS: int = abi.CONSTANTS["SERVICE_PORT_WORDS"]
_LINES = {
    IPPROTO_TCP: abi.CONSTANTS["PORTS_TCP"],
    IPPROTO_UDP: abi.CONSTANTS["PORTS_UDP"],
    IPPROTO_SCTP: abi.CONSTANTS["PORTS_SCTP"],
}


class ServicePorts:
    """Counts the keys of `services` for each protocol and port. Close with `close`.

    A word is written in one store. struct.pack_into() would write zeros first, and a program that reads
    meanwhile would find 64 ports unused.
    """

    def __init__(self, map_: Map) -> None:
        self._memory = map_.mapped()
        self._words = memoryview(self._memory).cast("Q")
        self._uses: Counter[int] = Counter()
        self._written = array("Q", bytes(8 * _WORDS))  # what the map should have

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    def read(self, services: Iterable[bytes]) -> None:
        """Bring the map in sync with these keys of `services`. No required bit is cleared meanwhile."""
        self._uses = Counter(_bits(services))
        self._written = _words(self._uses)
        for number, word in enumerate(self._written):
            if self._words[number] != word:
                self._words[number] = word

    def add(self, services: Iterable[bytes]) -> None:
        """Add these keys. Call it before they are written to `services`, which must not contain them yet."""
        for bit in _bits(services):
            self._uses[bit] += 1
            if self._uses[bit] == 1:
                self._write(bit, True)

    def check(self) -> Iterator[bool]:
        """Yield whether the map has the bits of all keys, and no others."""
        yield self._memory[: 8 * _WORDS] == self._written.tobytes()

    def remove(self, services: Iterable[bytes]) -> None:
        """Remove these keys. Call it after they were deleted from `services`."""
        for bit in _bits(services):
            self._uses[bit] -= 1
            if not self._uses[bit]:
                del self._uses[bit]
                self._write(bit, False)

    def _write(self, bit: int, present: bool) -> None:
        """Only this process writes the map, so the word need not be read."""
        number, mask = bit // _BITS, 1 << (bit % _BITS)
        word = self._written[number]
        self._words[number] = self._written[number] = word | mask if present else word & ~mask


def wrong_ports(memory: mmap, services: Iterable[bytes]) -> int:
    """The number of ports whose bit in `memory`, the mapped map, is not that of these keys of `services`."""
    words = memoryview(memory).cast("Q")
    try:
        wanted = enumerate(_words(_bits(services)))
        return sum((words[number] ^ word).bit_count() for number, word in wanted)
    finally:
        words.release()


def _words(bits: Iterable[int]) -> "array[int]":
    """The words of the map in which these bits are set."""
    words = array("Q", bytes(8 * _WORDS))
    for bit in bits:
        words[bit // _BITS] |= 1 << (bit % _BITS)
    return words


def _bits(services: Iterable[bytes]) -> Iterable[int]:
    """The bit of each key. A key of another program may have an unknown protocol, and has none."""
    for key in services:
        address, port, protocol, _ = abi.SERVICE_KEY.unpack(key)
        if protocol in _LINES:
            first = abi.CONSTANTS["NODE_PORT_LINES"] if is_unspecified(Address(address)) else 0
            yield (first + _LINES[protocol]) * abi.CONSTANTS["SERVICE_PORT_LINE"] * _BITS + ntohs(port)
