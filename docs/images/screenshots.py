"""The pictures of a comparison: writes charts to compare/, and screenshots of its report beside this file.

Run it after a change of docs/benchmarks/compare.json or of the report: `make screenshots`. It needs Chromium
and, as the charts, matplotlib (with Pillow). A test fails if the screenshots show another comparison.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, PngImagePlugin

from ebpfproxy.bench import chart_colors, html_report
from ebpfproxy.bench.results import from_json

FOLDER = Path(__file__).parent
SOURCE = FOLDER.parent / "benchmarks" / "compare.json"
KEY = "comparison"
"""The text of a screenshot with this key is the SHA-256 of SOURCE."""

_WIDTH, _HEIGHT = 1000, 1395
"""Pixels: the width of a page on GitHub, and the height of the first table and the first row of charts."""
_SHOWN = ("ratios-", "packet-", "changes-", "memory-")
"""The charts that the documentation shows."""
_PREFERRED = {"light": 1, "dark": 0}
"""Chromium's values of preferredColorScheme."""
_TIMEOUT = 120


def digest() -> str:
    """Return the SHA-256 of SOURCE."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def write_all(chromium: str) -> None:
    """Write the charts that are shown, and the screenshots. `chromium` is the path of the program."""
    comparison = from_json(SOURCE.read_bytes(), str(SOURCE))
    for name, svg in html_report.chart_files(comparison).items():
        if name.startswith(_SHOWN):
            (FOLDER / "compare" / name).write_text(svg)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(html_report.page(comparison))
        for scheme in chart_colors.SCHEMES:
            taken = Path(folder) / f"{scheme}.png"
            _take(chromium, page, taken, scheme)
            _compress(taken, FOLDER / f"report-{scheme}.png")


def _take(chromium: str, page: Path, output: Path, scheme: str) -> None:
    subprocess.run(
        [
            chromium,
            "--headless",
            "--no-sandbox",  # for root; the page has no script
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={page.parent / 'profile'}",
            f"--blink-settings=preferredColorScheme={_PREFERRED[scheme]}",
            f"--window-size={_WIDTH},{_HEIGHT}",
            f"--screenshot={output}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=_TIMEOUT,
    )


def _compress(source: Path, output: Path) -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text(KEY, digest())
    with Image.open(source) as image:
        reduced = image.convert("RGB").quantize(method=Image.Quantize.FASTOCTREE)
    reduced.save(output, optimize=True, pnginfo=text)


if __name__ == "__main__":
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        sys.exit("cannot find chromium; install it: apt-get install chromium")
    write_all(found)
