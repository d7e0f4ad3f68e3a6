"""Changes by other programs that the agent's own changes would hide."""

from ebpfproxy.backends.generation import Generation


class Kernel:
    def __init__(self) -> None:
        self.changes = 0
        self.generation = Generation(lambda: self.changes)

    def own_change(self) -> object:
        """Return the value after an own change."""
        with self.generation.own_change():
            self.changes += 1
        return self.generation.value()


def test_own_changes_alone_are_not_reported() -> None:
    kernel = Kernel()
    kernel.generation.reading()
    after = kernel.own_change()
    assert kernel.generation.value() == after
    after = kernel.own_change()
    assert kernel.generation.value() == kernel.generation.value() == after


def test_a_change_by_another_program_changes_the_value() -> None:
    kernel = Kernel()
    kernel.generation.reading()
    after = kernel.own_change()
    kernel.changes += 1
    assert kernel.generation.value() != after


def test_a_change_by_another_program_before_an_own_one_is_reported_until_the_next_read() -> None:
    kernel = Kernel()
    kernel.generation.reading()
    kernel.own_change()
    kernel.changes += 1
    after = kernel.own_change()
    assert kernel.generation.value() != after
    after = kernel.own_change()
    assert kernel.generation.value() != after
    kernel.generation.reading()
    after = kernel.own_change()
    assert kernel.generation.value() == after


def test_parts_that_own_changes_follow_are_ignored() -> None:
    present = {"one", "two"}
    generation = Generation(lambda: frozenset(present))
    generation.reading()
    with generation.own_change():
        pass
    present.discard("one")
    with generation.own_change(lambda names: names - {"one"}):
        pass
    after = generation.value()
    assert generation.value() == after
    present.discard("two")
    with generation.own_change(lambda names: names - {"one"}):
        pass
    assert generation.value() != generation.value()


def test_a_change_by_another_program_during_an_own_one_is_reported_if_own_changes_are_known() -> None:
    present = {"one"}
    generation = Generation(lambda: frozenset(present))
    generation.reading()
    with generation.own_change(is_own=lambda before, after: after == before | {"own"}):
        present.add("own")
    assert generation.value() == generation.value()
    with generation.own_change(is_own=lambda before, after: after == before | {"further"}):
        present.add("further")
        present.discard("one")
    assert generation.value() != generation.value()


def test_a_change_by_another_program_just_after_an_own_one_is_reported() -> None:
    """A proxier asks for the value after its own change, and compares later ones with it."""
    kernel = Kernel()
    kernel.generation.reading()
    with kernel.generation.own_change():
        kernel.changes += 1
    kernel.changes += 1
    after = kernel.generation.value()
    assert kernel.generation.value() != after
