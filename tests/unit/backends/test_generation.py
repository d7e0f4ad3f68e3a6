"""Changes of others that ours would hide."""

from ebpfproxy.backends.generation import Generation


class Kernel:
    def __init__(self) -> None:
        self.changes = 0
        self.generation = Generation(lambda: self.changes)

    def own_change(self) -> object:
        """The value after a change of ours."""
        with self.generation.own_change():
            self.changes += 1
        return self.generation.value()


def test_nothing_is_another_value_where_only_we_change_things() -> None:
    kernel = Kernel()
    kernel.generation.reading()
    after = kernel.own_change()
    assert kernel.generation.value() == after
    after = kernel.own_change()
    assert kernel.generation.value() == kernel.generation.value() == after


def test_a_change_of_somebody_else_is_another_value() -> None:
    kernel = Kernel()
    kernel.generation.reading()
    after = kernel.own_change()
    kernel.changes += 1
    assert kernel.generation.value() != after


def test_a_change_of_somebody_else_before_one_of_ours_is_told_until_all_is_read() -> None:
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


def test_what_our_change_follows_is_no_change_of_somebody_else() -> None:
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
