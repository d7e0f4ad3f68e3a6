"""The parts of a bundle that no command prints: versions, and the pages of the running agent."""

import http.client
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterator

from ebpfproxy import __version__
from ebpfproxy.config import Config
from ebpfproxy.diagnose import agent_pages
from ebpfproxy.diagnose.bundle.archive import Content, Part
from ebpfproxy.errors import NotFound

_METRICS_PAGES = {
    "/metrics": "agent/metrics.txt",
    "/statusz": "agent/statusz.txt",
    "/flagz": "agent/flagz.txt",
    "/configz": "agent/configz.json",
    "/proxyMode": "agent/proxymode.txt",
}
_HEALTH_PAGES = {"/healthz": "agent/healthz.txt", "/readyz": "agent/readyz.txt"}


def versions() -> Content:
    """The versions of ebpfproxy, its libraries, Python, the kernel and the distribution, as JSON."""
    host = os.uname()
    found = {
        "ebpfproxy": __version__,
        "kernel": f"{host.release} {host.version}",
        "architecture": host.machine,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "distribution": _distribution(),
        "libraries": dict(sorted(_libraries())),
        "collected": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return Content(json.dumps(found, indent=2) + "\n")


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _libraries() -> Iterator[tuple[str, str]]:
    wanted = importlib.metadata.requires("ebpfproxy") or []
    for name in {each.split(">")[0].split("=")[0].split(";")[0].strip() for each in wanted}:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def pages(config: Config) -> Iterator[Part]:
    """The pages of the running agent, a part for each. They need its --metrics-bind-address and ports."""
    for listen, found in ((config.metrics_listen, _METRICS_PAGES), (config.healthz_listen, _HEALTH_PAGES)):
        for page, file in found.items():
            yield Part(file, f"{page} of the running agent", _reader(listen, page))


def _reader(listen: tuple[str, int] | None, page: str) -> Callable[[], Content]:
    return lambda: _page(listen, page)


def _page(listen: tuple[str, int] | None, page: str) -> Content:
    if listen is None:
        raise NotFound(f"cannot read {page}: the agent has no such server with these flags")
    found = agent_pages.read(listen, page)
    return Content(found.text, "" if found.status == http.client.OK else f"HTTP status {found.status}")
