"""Removes secrets from the parts of a bundle. Pure.

The agent logs no secrets. But a flag, a URL or an object that someone pasted into a file may have one. Of
structured data, only members that are known to be harmless stay. Of text, what looks like a credential goes.
"""

import json
import re
from collections.abc import Iterator, Set
from typing import Any

import msgspec
import yaml

from ebpfproxy.diagnose.bundle.credentials import REDACTED, is_credential, without_credentials

_FIELDS = """
    apiVersion kind metadata name namespace generateName uid resourceVersion generation creationTimestamp
    deletionTimestamp labels items spec status conditions type reason message lastTransitionTime code details
    causes group field retryAfterSeconds
    clusterIP clusterIPs externalIPs loadBalancerIP loadBalancerClass loadBalancerSourceRanges loadBalancer
    ingress ip ipMode hostname ports port targetPort nodePort healthCheckNodePort protocol appProtocol
    externalName externalTrafficPolicy internalTrafficPolicy trafficDistribution ipFamilies ipFamilyPolicy
    sessionAffinity sessionAffinityConfig clientIP timeoutSeconds publishNotReadyAddresses
    allocateLoadBalancerNodePorts addressType endpoints addresses address ready serving terminating nodeName
    zone hints forZones forNodes targetRef kubernetes.io/service-name
    podCIDR podCIDRs nodeInfo kernelVersion osImage architecture kubeletVersion unschedulable taints effect
    topology.kubernetes.io/zone topology.kubernetes.io/region hostNetwork hostIP hostIPs podIP podIPs phase
    containers hostPort containerPort regarding involvedObject action reportingController eventTime
    clusters cluster server contexts context current-context
    service node mode error kernel ebpfproxy lastUpdated currentTime nodeEligible devices device side position
    before contested unreached
"""
"""Members of JSON and YAML in text. None can have a credential, other than in a form that
`without_credentials` recognizes. By line: any object, Services and EndpointSlices, Nodes, Pods and Events, a
kubeconfig, and what ebpfproxy prints."""
_OBJECT_FIELDS = frozenset(_FIELDS.split())
_RECORD = frozenset({"ts", "level", "msg"})
"""The first members of a line of the agent's log in JSON. Its other members are text."""
_MOST_FAILURES = 1000
_JSON = re.compile(r"\{\s*\"")
_YAML = re.compile(r"^(?P<indent> *)(?P<item>- )?apiVersion:[^\n]*(?:\n|\Z)", re.MULTILINE)
_OPTION = re.compile(r"(?:--)?([a-z][a-z0-9-]*)=(.*)", re.DOTALL)


def redact(text: str) -> str:
    """Replace secrets in free text; see `without_credentials`. JSON and objects of the Kubernetes API in YAML
    keep only members that are known to be harmless.

    >>> redact('failed: {"kind": "Status", "extra": [1]}')
    'failed: {"kind": "Status", "extra": "REDACTED"}'
    """
    return without_credentials(_without_json(_without_yaml(text)))


def redact_json(text: str, harmless: Set[str]) -> str:
    """Replace the members of JSON that are not in `harmless`, and secrets in the others. Text that is no JSON
    is free text.

    >>> redact_json('{"mode": "ebpf", "other": {"a": 1}}', {"mode"})
    '{\\n  "mode": "ebpf",\\n  "other": "REDACTED"\\n}\\n'
    """
    try:
        content = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return redact(text)
    return msgspec.json.format(msgspec.json.encode(_kept(content, harmless)), indent=2).decode() + "\n"


def redact_options(text: str, harmless: Set[str]) -> str:
    """Replace the values of options that are not in `harmless`, and secrets in the others. Each line is an
    option, with or without hyphens; other lines are free text.

    >>> redact_options("--mode=ebpf\\nother=1\\n", {"mode"})
    '--mode=ebpf\\nother=REDACTED\\n'
    """
    return "".join(_option(line, harmless) for line in text.splitlines(keepends=True))


def _option(line: str, harmless: Set[str]) -> str:
    match = _OPTION.fullmatch(line)
    if match and match[1] not in harmless:
        return f"{line[: match.start(2)]}{REDACTED}\n"
    return redact(line)


def _kept(value: Any, harmless: Set[str]) -> Any:
    if isinstance(value, dict):
        return {
            without_credentials(str(name)): _kept(each, harmless) if name in harmless else REDACTED
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_kept(each, harmless) for each in value]
    return without_credentials(value) if isinstance(value, str) else value


def _without_json(text: str) -> str:
    pieces: list[str] = []
    at = 0
    for start, end, value in _objects(text):
        kept = _record(value) if value.keys() >= _RECORD else _kept(value, _OBJECT_FIELDS)
        if kept != value:
            pieces += [text[at:start], json.dumps(kept, ensure_ascii=False)]
            at = end
    return "".join((*pieces, text[at:]))


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The objects of JSON in a text: start, end and value. Objects in objects are part of these.

    After _MOST_FAILURES, or if four times the text was read, the rest is not searched.
    """
    decoder = json.JSONDecoder()
    at, left, failures = 0, 4 * len(text), 0
    while left > 0 and failures < _MOST_FAILURES and (match := _JSON.search(text, at)):
        at = match.start() + 1
        try:
            value, at = decoder.raw_decode(text, match.start())
            yield match.start(), at, value
        except json.JSONDecodeError as error:
            left -= error.pos - match.start()
            failures += 1
        except RecursionError:
            failures += 1


def _record(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: REDACTED
        if is_credential(name) and value not in (None, "")
        else without_credentials(_without_json(value))
        if isinstance(value, str)
        else _kept(value, _OBJECT_FIELDS)
        for name, value in values.items()
    }


def _without_yaml(text: str) -> str:
    pieces: list[str] = []
    at = 0
    for match in _YAML.finditer(text):
        if match.start() < at:
            continue
        end = _end_of_object(text, match)
        pieces += [text[at : match.start()], _yaml(text[match.start() : end], match["indent"])]
        at = end
    return "".join((*pieces, text[at:]))


def _end_of_object(text: str, match: re.Match[str]) -> int:
    """The end of the lines that belong to an object: with more indentation, or members and items with that of
    the first line."""
    column = len(match["indent"]) + (2 if match["item"] else 0)
    line = re.compile(
        rf" {{{column}}}(?: |- |[\w\"'./-]+:(?:\s|\Z))[^\n]*(?:\n|\Z)|[ \t\r]*\n|[ \t]*#[^\n]*\n"
    )
    at = match.end()
    while at < len(text) and (found := line.match(text, at)):
        at = found.end()
    return at


def _yaml(text: str, indent: str) -> str:
    try:
        content = yaml.load(text, Loader=yaml.BaseLoader)  # it creates only texts
        shown = yaml.dump(_kept(content, _OBJECT_FIELDS), Dumper=yaml.SafeDumper, sort_keys=False)
    except (yaml.YAMLError, RecursionError):
        shown = f"{REDACTED}\n"
    return "".join(f"{indent}{line}\n" for line in shown.splitlines())
