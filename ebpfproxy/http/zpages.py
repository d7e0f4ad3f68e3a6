"""Pages about the process on port 10249: /configz, /flagz and /statusz.

/configz is that of kube-proxy: JSON with Go's names of the internal configuration
(pkg/proxy/apis/config/types.go), which tools read. It has only fields that have an effect here. The other two
are the pages of k8s.io/component-base/zpages: text for people, without a fixed format.
"""

import dataclasses
import json
import platform
import time
from collections.abc import Mapping
from typing import Any

from ebpfproxy import __version__
from ebpfproxy.config import Loaded
from ebpfproxy.config.flag_types import split_words
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.http.server import Request, Response, plain

_WARNING = "Warning: This page is for people who debug the agent. Its format may change.\n"
_TITLE = "\nebpfproxy {}\n" + _WARNING + "\n"
_PAGES = ("/configz", "/flagz", "/healthz", "/metrics", "/proxyMode", "/statusz")

_FIELDS = {
    "Linux.MasqueradeAll": "masquerade_all",
    "Linux.OOMScoreAdj": "oom_score_adj",
    "Linux.Conntrack.MaxPerCore": "conntrack_max_per_core",
    "Linux.Conntrack.Min": "conntrack_min",
    "Linux.Conntrack.TCPEstablishedTimeout": "conntrack_tcp_timeout_established",
    "Linux.Conntrack.TCPCloseWaitTimeout": "conntrack_tcp_timeout_close_wait",
    "Linux.Conntrack.TCPBeLiberal": "conntrack_tcp_be_liberal",
    "Linux.Conntrack.UDPTimeout": "conntrack_udp_timeout",
    "Linux.Conntrack.UDPStreamTimeout": "conntrack_udp_timeout_stream",
    "ClientConnection.Kubeconfig": "kubeconfig",
    "Logging.format": "logging_format",
    "Logging.verbosity": "verbosity",
    "HostnameOverride": "hostname_override",
    "BindAddress": "bind_address",
    "BindAddressHardFail": "bind_address_hard_fail",
    "Mode": "proxy_mode",
    "IPTables.MasqueradeBit": "iptables_masquerade_bit",
    "IPTables.LocalhostNodePorts": "iptables_localhost_nodeports",
    "NFTables.MasqueradeBit": "iptables_masquerade_bit",
    "IPVS.Scheduler": "ipvs_scheduler",
    "IPVS.ExcludeCIDRs": "ipvs_exclude_cidrs",
    "IPVS.StrictARP": "ipvs_strict_arp",
    "IPVS.TCPTimeout": "ipvs_tcp_timeout",
    "IPVS.TCPFinTimeout": "ipvs_tcpfin_timeout",
    "IPVS.UDPTimeout": "ipvs_udp_timeout",
    "DetectLocalMode": "detect_local_mode",
    "DetectLocal.BridgeInterface": "pod_bridge_interface",
    "DetectLocal.ClusterCIDRs": "cluster_cidr",
    "DetectLocal.InterfaceNamePrefix": "pod_interface_name_prefix",
    "NodePortAddresses": "nodeport_addresses",
    "SyncPeriod": "sync_period",
    "MinSyncPeriod": "min_sync_period",
}
"""The option of each field, by its path of Go names."""


def page(request: Request, loaded: Loaded) -> Response | None:
    """Return the page at the path of the request, None if there is no such page."""
    match request.path:
        case "/configz":
            body = json.dumps(_configz(loaded)).encode()
            return Response(200, body, {"Content-Type": "application/json"})
        case "/flagz":
            return _text(request, _TITLE.format("flags") + _flags(loaded))
        case "/statusz":
            return _text(request, _TITLE.format("statusz") + _status())
    return None


def _text(request: Request, text: str) -> Response:
    accepted = request.headers.get("Accept", "*/*")
    kinds = {each.partition(";")[0].strip() for each in accepted.split(",")}
    if not kinds & {"", "*/*", "text/*", "text/plain"}:
        return plain(406, "media type not acceptable, must be: text/plain")
    return plain(200, text)


def _configz(loaded: Loaded) -> dict[str, Any]:
    texts = _texts(loaded)
    tree: dict[str, Any] = {}
    for path, name in _FIELDS.items():
        *sections, last = path.split(".")
        mapping = tree
        for section in sections:
            mapping = mapping.setdefault(section, {})
        mapping[last] = _value(name, texts[name])
    for name, listen in (
        ("HealthzBindAddress", loaded.config.healthz_listen),
        ("MetricsBindAddress", loaded.config.metrics_listen),
    ):
        host, port = listen or ("", 0)
        tree[name] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}" if listen else ""
    return {"kubeproxy.config.k8s.io": tree}


def _texts(loaded: Loaded) -> dict[str, Any]:
    """Return the text, or texts, of each option in effect, by name."""
    given = {name: loaded.texts.get(name) for name in OPTIONS}
    return {
        name: (option.default or "") if given[name] in (None, ()) else given[name]
        for name, option in OPTIONS.items()
    }


def _value(name: str, text: Any) -> Any:
    kind = OPTIONS[name].kind
    if kind.many:
        return split_words((text,) if isinstance(text, str) else text)
    if name == "cluster_cidr":
        return split_words([text])
    if kind.boolean or kind.number:
        return OPTIONS[name].parse(text)
    return text


def _flags(loaded: Loaded) -> str:
    texts = _texts(dataclasses.replace(loaded, texts=loaded.flags))
    shown: Mapping[str, Any] = {
        OPTIONS[name].flag.lstrip("-"): text if isinstance(text, str) else ",".join(text)
        for name, text in texts.items()
    }
    return "".join(f"{flag}={text}\n" for flag, text in sorted(shown.items()))


def _status() -> str:
    began, up = _times()
    rows = {
        "Started": time.strftime("%a %b %e %H:%M:%S %Z %Y", time.localtime(began)),
        "Up": f"{up // 3600} hr {up // 60 % 60:02} min {up % 60:02} sec",
        "Python version": platform.python_version(),
        "Binary version": __version__,
        "Paths": " ".join(_PAGES),
    }
    return "".join(f"{name}: {value}\n" for name, value in rows.items())


_BEGAN = time.time()
"""When this module was imported: at the start of the process, also after a restart in its place."""


def _times() -> tuple[float, int]:
    """Return the Unix time of the start, and the whole seconds since then."""
    return _BEGAN, int(time.time() - _BEGAN)
