"""The HTML report: it is complete, self-contained and follows the color scheme."""

import html.parser
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from ebpfproxy.bench import chart_colors, charts, compare_cases, html_report
from ebpfproxy.cli import bench_compare
from ebpfproxy.errors import ConfigError
from tests.support.documented import ROOT
from tests.unit.bench.comparisons import ENVIRONMENT, MODES, comparison

NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


class Page(html.parser.HTMLParser):
    """The tags and texts of a page, and its elements <svg>."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.svgs = [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "data", "action"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "br"):
            self.open.pop()

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


def test_the_page_is_well_formed_and_its_ids_are_unique(page: Page) -> None:
    assert page.open == page.unbalanced == []
    assert len(set(page.ids)) == len(page.ids) > 0


def test_the_page_refers_to_nothing_outside(text: str, page: Page) -> None:
    assert all(link.startswith("#") for link in page.links)
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert not re.search(r"url\((?!#)|@import|<script|<link|<img", text)
    outside = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "names of namespaces"


def test_every_metric_has_a_panel_and_every_mode_a_series(page: Page) -> None:
    texts = ["".join(each.itertext()) for svg in page.svgs for each in svg.findall(".//svg:text", NAMESPACE)]
    metrics = [case.metric for case in compare_cases.TRAFFIC.values()] + [*compare_cases.OF_STARTS.values()]
    for metric in metrics:
        assert charts.TITLES[metric] in texts
    assert len(page.svgs) == 5
    for svg in page.svgs:
        legend = {"".join(each.itertext()) for each in svg.findall(".//svg:text", NAMESPACE)}
        drawn = ElementTree.tostring(svg, encoding="unicode")
        for mode in MODES[1:]:
            assert mode in legend
            assert f"var(--chart-{mode})" in drawn


def test_every_color_of_a_chart_is_defined_for_both_color_schemes(text: str) -> None:
    light, dark = (
        dict(re.findall(r"(--chart-[a-z-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root \{ ((?:--chart-[a-z-]+: #[0-9a-f]{6}; ?)+)", text)
    )
    used = set(re.findall(r"var\((--chart-[a-z-]+)\)", text))
    assert used <= set(light) == set(dark)
    assert "@media (prefers-color-scheme: dark) { :root { --chart-text" in text
    assert all(light[name] != dark[name] for name in used)
    in_charts = {
        color
        for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)
        for color in re.findall(r"#[0-9a-f]{6}\b", svg)
    }
    assert not in_charts, "a fixed color is invisible in one of the schemes"


def test_the_page_has_environment_and_method_with_escaped_text(text: str, page: Page) -> None:
    texts = "".join(page.texts)
    for fact in (ENVIRONMENT.kernel, ENVIRONMENT.cpu, "v1.34.0", "2 at the end", "'--cases=<all>'"):
        assert fact in texts
    assert "<2.5" not in text
    assert "ipvs is not measured with 1,000 Services" in texts
    for case in compare_cases.NAMES:
        assert html_report._PATHS[case]


def test_charts_for_documents_have_the_colors_of_one_scheme() -> None:
    files = html_report.chart_files(comparison())
    assert len(files) == 10
    for name, svg in files.items():
        ElementTree.fromstring(svg)
        assert "var(" not in svg
        assert "#0a0b" not in svg
        other = name.replace("-light", "-dark") if "-light" in name else name.replace("-dark", "-light")
        assert files[other] != svg


SCREENSHOTS_MAX = 200_000
"""Bytes of a picture in the documentation."""


@pytest.mark.parametrize("scheme", chart_colors.SCHEMES)
def test_the_screenshots_show_the_comparison_of_the_documentation(scheme: str) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "images" / "screenshots.py"))
    path = made["FOLDER"] / f"report-{scheme}.png"
    with Image.open(path) as image:
        assert image.info[made["KEY"]] == made["digest"](), "run `make screenshots`"
        brightness = image.convert("L").getpixel((0, 0))
    assert isinstance(brightness, int)
    assert (brightness > 128) is (scheme == "light")
    assert path.stat().st_size <= SCREENSHOTS_MAX


def test_an_earlier_run_is_converted_to_all_formats(text: str, tmp_path: Path) -> None:
    source = tmp_path / "report.json"
    source.write_bytes(comparison().to_json())
    outputs = [tmp_path / name for name in ("copy.json", "report.csv", "report.html")]
    arguments = [f"--from={source}", *(f"--output={path}" for path in outputs), f"--charts={tmp_path}"]
    result = CliRunner().invoke(bench_compare.command, arguments)
    assert result.exit_code == 0, result.output
    assert outputs[0].read_bytes() == source.read_bytes()
    assert outputs[1].read_text() == comparison().to_csv()
    assert outputs[2].read_text() == text
    assert (tmp_path / "ratios-dark.svg").exists()
    assert "kube-proxy-iptables" in result.output


@pytest.mark.parametrize("output", ["report.pdf", "report", "missing/report.json"])
def test_an_output_that_cannot_be_written_is_rejected_before_the_run(output: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(bench_compare.command, [f"--output={tmp_path / output}"])
    assert result.exit_code == 2
    assert "Invalid value" in result.output


def test_without_matplotlib_the_error_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as raised:
        charts.all_charts(comparison())
    assert "pip install 'ebpfproxy[bench]'" in raised.value.hint


def test_the_command_does_not_import_matplotlib_before_it_draws() -> None:
    code = "import sys, ebpfproxy.cli.bench; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
