"""Pages about the process on port 10249: /configz, /flagz, /statusz and /debug/flags/v.

/configz has the configuration in effect, as kube-proxy 1.36 has: JSON with the names of v1alpha1. It has only
fields that have an effect here. The other two are the pages of k8s.io/component-base/zpages (KEP-4827 and
KEP-4828): text for people, without a fixed format, or an object of the API group config.k8s.io as JSON.
/debug/flags/v (k8s.io/apiserver/pkg/server/routes/flags.go) exists with --profiling.
"""

import json
import platform
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from ebpfproxy import __version__, log
from ebpfproxy.config import Loaded
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.http.server import Request, Response, plain

_NAME = "ebpfproxy"
_WARNING = "Warning: This page is for people who debug the agent. Its format may change.\n"
_TITLE = f"\n{_NAME} {{}}\n{_WARNING}\n"
_GROUP, _VERSIONS = "config.k8s.io", ("v1beta1", "v1alpha1")
_TEXT_TYPES = ("*/*", "text/*", "text/plain")
_PATHS = (
    "/configz",
    "/flagz",
    "/healthz",
    "/healthz/ping",
    "/metrics",
    "/metrics/slis",
    "/proxyMode",
    "/readyz",
    "/statusz",
)

_BEGAN = time.time()
"""When this module was imported: at the start of the process, also after a restart in its place."""


def page(request: Request, loaded: Loaded) -> Response | None:
    """Return the page at the path of the request, None if there is no such page."""
    match request.path:
        case "/configz":
            from ebpfproxy.config import file  # not at the top: it imports YAML

            return _json({"kubeproxy.config.k8s.io": file.as_tree(loaded)})
        case "/flagz":
            flags = _flags(loaded)
            text = "".join(f"{name}={value}\n" for name, value in flags.items())
            return _negotiated(request, "Flagz", "flags", text, lambda: {"flags": flags})
        case "/statusz":
            text = "".join(f"{name}: {value}\n" for name, value in _status_rows().items())
            return _negotiated(request, "Statusz", "statusz", text, _status)
        case "/debug/flags/v" if loaded.config.profiling:
            return _set_verbosity(request)
    return None


def _set_verbosity(request: Request) -> Response:
    if request.method != "PUT":
        return plain(406, "unsupported http method\n")
    try:
        verbosity = OPTIONS["verbosity"].parse(request.body.decode(errors="replace"))
    except ValueError as error:
        return plain(400, f"cannot set the log level: {error}\n")
    log.set_verbosity(verbosity)
    return plain(200, f"the log level is {verbosity}\n")


def _negotiated(
    request: Request, kind: str, title: str, text: str, fields: Callable[[], dict[str, Any]]
) -> Response:
    """Return the first format of the header Accept that is available; 406 if none is.

    As in kube-proxy, an object needs all parameters: application/json;g=config.k8s.io;v=v1beta1;as=KIND.
    Weights (q) are not compared.
    """
    for media_type, parameters in _accepted(request.headers.get("Accept") or "*/*"):
        if media_type in _TEXT_TYPES:
            return plain(200, _TITLE.format(title) + text)
        version = parameters.get("v")
        wanted = (media_type, parameters.get("g"), parameters.get("as"))
        if wanted == ("application/json", _GROUP, kind) and version in _VERSIONS:
            head = {"kind": kind, "apiVersion": f"{_GROUP}/{version}", "metadata": {"name": _NAME}}
            return _json(head | fields())
    offered = f"text/plain, application/json;g={_GROUP};v={_VERSIONS[0]};as={kind}"
    return plain(406, f"media type not acceptable, must be one of: {offered}\n")


def _accepted(header: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the media types of a header Accept in lower case, each with its parameters.

    >>> list(_accepted("application/json;v=v1beta1;as=Flagz, */*"))
    [('application/json', {'v': 'v1beta1', 'as': 'Flagz'}), ('*/*', {})]
    """
    for media_range in header.split(","):
        media_type, *parameters = media_range.split(";")
        pairs = (each.partition("=") for each in parameters)
        yield media_type.strip().lower(), {name.strip(): value.strip() for name, _, value in pairs}


def _json(body: dict[str, Any]) -> Response:
    headers = {"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"}
    return Response(200, json.dumps(body).encode(), headers)


def _flags(loaded: Loaded) -> dict[str, str]:
    """Return the text of each flag, given or by default, by its name without dashes, sorted."""
    texts = {}
    for name, option in OPTIONS.items():
        given = loaded.flags.get(name)
        text = (option.default or "") if given in (None, ()) else given
        texts[option.flag.lstrip("-")] = text if isinstance(text, str) else ",".join(text)
    return dict(sorted(texts.items()))


def _status_rows() -> dict[str, str]:
    up = _seconds_up()
    return {
        "Started": time.strftime("%a %b %e %H:%M:%S %Z %Y", time.localtime(_BEGAN)),
        "Up": f"{up // 3600} hr {up // 60 % 60:02} min {up % 60:02} sec",
        "Python version": platform.python_version(),
        "Binary version": __version__,
        "Paths": " ".join(_PATHS),
    }


def _status() -> dict[str, Any]:
    """Return the fields of a Statusz. `goVersion` is required there, and empty: the agent has no Go."""
    return {
        "startTime": datetime.fromtimestamp(_BEGAN, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "uptimeSeconds": _seconds_up(),
        "goVersion": "",
        "binaryVersion": __version__,
        "paths": list(_PATHS),
    }


def _seconds_up() -> int:
    return int(time.time() - _BEGAN)
