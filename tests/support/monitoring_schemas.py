"""Schemas of the objects of the Prometheus operator, as far as ebpfproxy uses them.

They describe only the fields that the manifests have, so that any other field is an error: a field of the
operator that is added here needs its type. Sources: the resource definitions of prometheus-operator 0.82
(example/prometheus-operator-crd) and pkg/apis/monitoring/v1.
"""

from typing import Any

import jsonschema

_TEXT = {"type": "string"}
_NAME = {"type": "string", "minLength": 1}
_LABELS = {"type": "object", "additionalProperties": _TEXT}
_DURATION = {
    "type": "string",
    "pattern": r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
    "minLength": 1,
}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_RULE = _object(
    ("alert", "expr"), alert=_NAME, expr=_NAME, **{"for": _DURATION}, labels=_LABELS, annotations=_LABELS
)
_GROUP = _object(("name",), name=_NAME, rules={"type": "array", "items": _RULE})
_RELABELING = _object(
    sourceLabels={"type": "array", "items": {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}},
    targetLabel=_TEXT,
    regex=_TEXT,
    action={"enum": ["replace", "keep", "drop"]},
)
_RELABELINGS = {"type": "array", "items": _RELABELING}
_ENDPOINT = _object(port=_TEXT, interval=_DURATION, relabelings=_RELABELINGS, metricRelabelings=_RELABELINGS)
_SPECS = {
    "PrometheusRule": _object(groups={"type": "array", "items": _GROUP}),
    "PodMonitor": _object(
        ("selector",),
        selector=_object(matchLabels=_LABELS),
        podMetricsEndpoints={"type": "array", "items": _ENDPOINT},
    ),
}


def validate(entry: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError if an object of these kinds is invalid."""
    schema = _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind={"const": entry["kind"]},
        metadata=_object(("name", "namespace"), name=_NAME, namespace=_NAME, labels=_LABELS),
        spec=_SPECS[entry["kind"]],
    )
    jsonschema.Draft202012Validator(schema).validate(entry)
