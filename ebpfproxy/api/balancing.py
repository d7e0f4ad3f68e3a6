"""Parse the annotations of a Service: how it is load balanced, and what happens to its connections."""

import enum
from collections.abc import Callable
from typing import TypeVar

from ebpfproxy.api import fields
from ebpfproxy.api.event import Excess
from ebpfproxy.api.parts import Complaints, shorten
from ebpfproxy.config.flag_types import parse_percentage, parse_timeout
from ebpfproxy.model.balancing import (
    DEFAULT_BALANCING,
    Balancing,
    EbpfForwarding,
    Forwarding,
    TooManyRules,
    parse_algorithm,
    parse_weights,
)
from ebpfproxy.model.service import RemovedEndpoints

_T = TypeVar("_T")
_E = TypeVar("_E", bound=enum.Enum)


def balancing(annotations: fields.Annotations | None, complaints: Complaints) -> Balancing:
    """Return what the annotations request. An invalid annotation counts as missing."""
    if annotations is None:
        return DEFAULT_BALANCING
    found = Balancing(
        _parsed(annotations, "lb_algorithm", parse_algorithm, None, complaints),
        _parsed(annotations, "endpoint_weights", parse_weights, (), complaints),
        _parsed(annotations, "slow_start", parse_timeout, None, complaints),
        _parsed(annotations, "ipvs_forwarding", _one_of(Forwarding), None, complaints),
        _parsed(annotations, "ebpf_forwarding", _one_of(EbpfForwarding), None, complaints),
    )
    return found if found != DEFAULT_BALANCING else DEFAULT_BALANCING


def removed_endpoints(
    annotations: fields.Annotations | None, complaints: Complaints
) -> RemovedEndpoints | None:
    """Return what the annotation requests for connections to removed endpoints, None without a valid one."""
    if annotations is None:
        return None
    return _parsed(annotations, "removed_endpoints", _one_of(RemovedEndpoints), None, complaints)


def rebalance(annotations: fields.Annotations | None, complaints: Complaints) -> int | None:
    """Return the percentage of the annotation, None without a valid one."""
    if annotations is None:
        return None
    return _parsed(annotations, "rebalance", parse_percentage, None, complaints)


def _parsed(
    annotations: fields.Annotations,
    name: str,
    parse: Callable[[str], _T],
    missing: _T,
    complaints: Complaints,
) -> _T:
    text = getattr(annotations, name)
    if not text:
        return missing
    try:
        return parse(text.strip())
    except ValueError as error:
        annotation = f"ebpfproxy/{name.replace('_', '-')}"
        complaints.append(f"annotation {annotation}: {shorten(str(error))}")
        if isinstance(error, TooManyRules):
            complaints.excess = Excess(annotation, str(error))
        return missing


def _one_of(values: type[_E]) -> Callable[[str], _E]:
    def parse(text: str) -> _E:
        try:
            return values(text)
        except ValueError:
            names = ", ".join(each.value for each in values)
            raise ValueError(f'"{text}" is not one of {names}') from None

    return parse
