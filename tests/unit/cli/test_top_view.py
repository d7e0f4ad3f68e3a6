"""The live view of `top`, driven by textual's pilot."""

import asyncio

from textual.widgets import DataTable, Static

from ebpfproxy.backends.ebpf.inspect.events import Lost
from ebpfproxy.backends.ebpf.inspect.rates import EndpointRate, Sample, ServiceRate
from ebpfproxy.cli.top_view import TopView

BUSY = Sample(
    [ServiceRate("default/web:http", 12.5, 1.0, None), ServiceRate("default/db:sql", 2.0, 0.0, 1234567.0)],
    [EndpointRate("default/web:http", "10.244.1.3:8080", 12.5, 1.0)],
    Lost(0, 3),
)


class Counted:
    """A source whose samples are all the same."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.taken = sample, 0

    def collect(self) -> None:
        pass

    def take(self) -> Sample:
        self.taken += 1
        return self.sample


def rows(view: TopView, name: str) -> list[list[str]]:
    table = view.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(at)] for at in range(table.row_count)]


def test_both_tables_show_the_sample() -> None:
    async def scenario() -> None:
        source = Counted(BUSY)
        view = TopView(source, 0.05)
        async with view.run_test() as pilot:
            while not source.taken:
                await pilot.pause(0.05)
            await pilot.pause()
            assert rows(view, "services") == [
                ["default/web:http", "12.5", "1.0", "-"],
                ["default/db:sql", "2.0", "0.0", "1,234,567"],
            ]
            assert rows(view, "endpoints") == [["default/web:http", "10.244.1.3:8080", "12.5", "1.0"]]
            assert "3 lost" in str(view.query_one("#status", Static).render())

    asyncio.run(scenario())


def test_a_sample_after_the_tables_were_removed_is_no_error() -> None:
    """Textual removes them before it stops the timer: `q` sometimes ended with a traceback."""

    async def scenario() -> None:
        view = TopView(Counted(BUSY), 3600)
        async with view.run_test() as pilot:
            await view.query(DataTable).remove()
            view._refresh_tables()
            await pilot.press("q")
        assert view.return_code == 0

    asyncio.run(scenario())


def test_a_pause_keeps_the_tables_and_q_ends() -> None:
    async def scenario() -> None:
        source = Counted(BUSY)
        view = TopView(source, 0.05)
        async with view.run_test() as pilot:
            while not source.taken:
                await pilot.pause(0.05)
            await pilot.press("p")
            source.sample = Sample([], [], Lost(0, 0))
            seen = source.taken
            while source.taken < seen + 2:
                await pilot.pause(0.05)
            assert len(rows(view, "services")) == 2
            await pilot.press("p")
            seen = source.taken
            while source.taken < seen + 2:
                await pilot.pause(0.05)
            assert rows(view, "services") == []
            await pilot.press("q")
        assert view.return_code == 0

    asyncio.run(scenario())
