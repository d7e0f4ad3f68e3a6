"""Which places are reported, given the packet counts of devices and programs."""

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.devices.packet_check import LEAST, Count, Hook, Judge, slot

ETH0 = Hook(2, "ingress", "eth0")
ETH1 = Hook(3, "egress", "eth1")


def judged(*rows: tuple[int, int]) -> list[bool]:
    """Whether eth0 is reported after each row: packets of the device, and of the program."""
    judge = Judge()
    return [ETH0 in judge.unreached({ETH0: Count(*row)}) for row in rows]


def test_packets_that_only_the_device_counts_are_reported_after_two_intervals() -> None:
    rows = [(1000 + LEAST * n, 7) for n in range(4)]
    assert judged(*rows) == [False, False, True, True]


def test_one_packet_counted_by_the_program_prevents_a_report() -> None:
    """GRO merges up to 64 packets into one, and a tunnel counts other packets than its device."""
    assert judged((0, 0), (10_000, 1), (20_000, 2), (30_000, 3)) == [False] * 4


def test_few_packets_are_not_reported() -> None:
    assert judged(*((n * (LEAST - 1), 0) for n in range(10))) == [False] * 10


def test_a_quiet_device_stays_reported_until_a_packet_reaches_the_program() -> None:
    unreached = [(LEAST * n, 0) for n in range(3)]
    assert judged(*unreached, (2 * LEAST, 0), (2 * LEAST + 1, 1), (3 * LEAST, 2)) == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_packets_counted_by_the_program_restart_the_confirmation() -> None:
    assert judged((0, 0), (LEAST, 0), (2 * LEAST, 1), (3 * LEAST, 1), (4 * LEAST, 1))[-2:] == [False, True]


def test_places_are_independent_and_new_ones_are_evaluated_from_the_next_interval_on() -> None:
    judge = Judge()
    judge.unreached({ETH0: Count(0, 0)})
    judge.unreached({ETH0: Count(LEAST, 0), ETH1: Count(5000, 0)})
    found = judge.unreached({ETH0: Count(2 * LEAST, 0), ETH1: Count(6000, 0)})
    assert found == {ETH0}
    assert judge.unreached({ETH1: Count(7000, 0)}) == {ETH1}


def test_every_side_of_every_device_has_its_own_slot_up_to_the_number_of_slots() -> None:
    slots = {slot(index, side) for index in range(abi.DEVICE_SLOTS) for side in ("ingress", "egress")}
    assert slots == set(range(2 * abi.DEVICE_SLOTS))
    assert slot(2 + abi.DEVICE_SLOTS, "egress") == slot(2, "egress") == 5
