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
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.diagnose import agent_pages
from ebpfproxy.diagnose.bundle.archive import Content, Part
from ebpfproxy.errors import NotFound


def _wanted() -> set[str]:
    """The names of libraries."""
    requirements = importlib.metadata.requires("ebpfproxy") or []
    return {each.split(">")[0].split("=")[0].split(";")[0].strip() for each in requirements}


def _fields() -> Iterator[str]:
    for option in OPTIONS.values():
        for field in option.fields:
            yield from field.split(".")


VERSIONS = frozenset(
    {"ebpfproxy", "kernel", "architecture", "cpus", "python", "distribution", "libraries", "collected"}
) | frozenset(_wanted())
"""The members of `versions`. None has a secret."""
FLAGS = frozenset(option.flag.lstrip("-") for option in OPTIONS.values())
"""The options of the agent. None has a secret, other than in a URL."""
FIELDS = frozenset({"kubeproxy.config.k8s.io", "apiVersion", "kind", *_fields()})
"""The fields of /configz, those of a KubeProxyConfiguration. None has a secret."""
_METRICS_PAGES = {
    "/metrics": "agent/metrics.txt",
    "/statusz": "agent/statusz.txt",
    "/flagz": "agent/flagz.txt",
    "/configz": "agent/configz.json",
    "/proxyMode": "agent/proxymode.txt",
}
_HARMLESS = {"/configz": FIELDS, "/flagz": FLAGS}
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
    for name in _wanted():
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def pages(config: Config) -> Iterator[Part]:
    """The pages of the running agent, a part for each. They need its --metrics-bind-address and ports."""
    for listen, found in ((config.metrics_listen, _METRICS_PAGES), (config.healthz_listen, _HEALTH_PAGES)):
        for page, file in found.items():
            title = f"{page} of the running agent"
            yield Part(file, title, _reader(listen, page), _HARMLESS.get(page, frozenset()))


def _reader(listen: tuple[str, int] | None, page: str) -> Callable[[], Content]:
    return lambda: _page(listen, page)


def _page(listen: tuple[str, int] | None, page: str) -> Content:
    if listen is None:
        raise NotFound(f"cannot read {page}: the agent has no such server with these flags")
    found = agent_pages.read(listen, page)
    return Content(found.text, "" if found.status == http.client.OK else f"HTTP status {found.status}")
