"""Parse the annotations of a Service that select how it is load balanced."""

import enum
from collections.abc import Callable
from typing import TypeVar

from ebpfproxy.api import fields
from ebpfproxy.api.event import Excess
from ebpfproxy.api.parts import Complaints, shorten
from ebpfproxy.config.flag_types import parse_timeout
from ebpfproxy.model.balancing import (
    DEFAULT_BALANCING,
    Balancing,
    EbpfForwarding,
    Forwarding,
    TooManyRules,
    parse_algorithm,
    parse_weights,
)

_T = TypeVar("_T")
_E = TypeVar("_E", bound=enum.Enum)


def balancing(annotations: fields.Annotations | None, complaints: Complaints) -> Balancing:
    """Return what the annotations request. An invalid annotation counts as missing."""
    if annotations is None:
        return DEFAULT_BALANCING

    def parsed(name: str, parse: Callable[[str], _T], missing: _T) -> _T:
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

    found = Balancing(
        parsed("lb_algorithm", parse_algorithm, None),
        parsed("endpoint_weights", parse_weights, ()),
        parsed("slow_start", parse_timeout, None),
        parsed("ipvs_forwarding", _one_of(Forwarding), None),
        parsed("ebpf_forwarding", _one_of(EbpfForwarding), None),
    )
    return found if found != DEFAULT_BALANCING else DEFAULT_BALANCING


def _one_of(values: type[_E]) -> Callable[[str], _E]:
    def parse(text: str) -> _E:
        try:
            return values(text)
        except ValueError:
            names = ", ".join(each.value for each in values)
            raise ValueError(f'"{text}" is not one of {names}') from None

    return parse
