"""The HTML report: it is complete, self-contained and follows the color scheme."""

import html.parser
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ebpfproxy.bench import compare_cases, html_report
from ebpfproxy.cli import bench_compare
from tests.unit.bench.comparisons import ENVIRONMENT, MODES, comparison


class Page(html.parser.HTMLParser):
    """The tags and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "xlink:href", "data", "action"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def text() -> str:
    return html_report.page(comparison())


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_the_page_is_well_formed(page: Page) -> None:
    assert page.open == page.unbalanced == []


def test_the_page_refers_to_nothing_outside(text: str, page: Page) -> None:
    assert not page.links
    assert not re.search(r"url\(|@import|https?:|<script|<link|<img", text)


def test_every_case_has_a_row_and_every_mode_a_column_for_each_number_of_services(text: str) -> None:
    tables = re.findall(r"<h2>Ratios with ([\d,]+) Services</h2>.*?<table>(.*?)</table>", text, re.DOTALL)
    assert [services for services, _ in tables] == ["1,000", "1"]
    for _, table in tables:
        for title in html_report._TITLES.values():
            assert f"<td>{title}</td>" in table
        assert re.findall(r"<th>(.*?)</th>", table) == ["case", *MODES]


def test_a_larger_ratio_has_a_longer_bar(text: str) -> None:
    title = html_report._TITLES["connect_us"]
    row = text[text.index(f"<td>{title}</td>") :].splitlines()[0]
    assert re.findall(r"var\(--bar\) (\d+)%.*?>([\d.]+)<br>", row) == [
        ("14", "1.10"),
        ("26", "1.20"),
        ("38", "1.30"),
    ]


def test_the_page_has_environment_and_method_with_escaped_text(text: str, page: Page) -> None:
    texts = "".join(page.texts)
    for fact in (ENVIRONMENT.kernel, ENVIRONMENT.cpu, "v1.34.0", "2 at the end", "'--cases=<all>'"):
        assert fact in texts
    assert "<2.5" not in text
    assert "ipvs is not measured with 1,000 Services" in texts
    for case in compare_cases.NAMES:
        assert html_report._PATHS[case]


def test_an_earlier_run_is_converted_to_all_formats(text: str, tmp_path: Path) -> None:
    source = tmp_path / "report.json"
    source.write_bytes(comparison().to_json())
    outputs = [tmp_path / name for name in ("copy.json", "report.csv", "report.html")]
    arguments = [f"--from={source}", *(f"--output={path}" for path in outputs)]
    result = CliRunner().invoke(bench_compare.command, arguments)
    assert result.exit_code == 0, result.output
    assert outputs[0].read_bytes() == source.read_bytes()
    assert outputs[1].read_text() == comparison().to_csv()
    assert outputs[2].read_text() == text
    assert "kube-proxy-iptables" in result.output


@pytest.mark.parametrize("output", ["report.pdf", "report", "missing/report.json"])
def test_an_output_that_cannot_be_written_is_rejected_before_the_run(output: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(bench_compare.command, [f"--output={tmp_path / output}"])
    assert result.exit_code == 2
    assert "Invalid value" in result.output
