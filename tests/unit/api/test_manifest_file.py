"""One file of manifests: YAML and JSON, documents, lines, and everything YAML may spring on us."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.api.event import Event, Invalid, NodeChanged, PeerChanged, ServiceChanged, SliceChanged
from ebpfproxy.api.manifest_file import Unreadable, read_manifest
from ebpfproxy.model.address import parse_address
from tests.support.build import name, node_object, service_object, slice_object

SERVICE = """\
kind: Service
apiVersion: v1
metadata: {name: web}
spec:
  clusterIP: 10.96.0.10
  ports: [{port: 80}]
"""

SLICE = """\
kind: EndpointSlice
apiVersion: discovery.k8s.io/v1
metadata:
  name: web-1
  labels: {kubernetes.io/service-name: web}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints:
"""


def events(content: str | bytes, called: str = "a.yaml") -> list[Event]:
    raw = content.encode() if isinstance(content, str) else content
    return [event for _, event in read_manifest(called, raw, "here")]


def only_invalid(content: str | bytes, called: str = "a.yaml") -> Invalid:
    (event,) = events(content, called)
    assert isinstance(event, Invalid), event
    return event


def test_each_document_is_reported_with_its_first_line() -> None:
    content = f"# a comment\n---\n{SERVICE}---\n---\n# nothing\n---\n{SLICE}- addresses: [10.1.0.1]\n...\n"
    located = read_manifest("a.yaml", content.encode(), "here")
    assert [(where, type(event)) for where, event in located] == [
        ("a.yaml:3", ServiceChanged),
        ("a.yaml:13", SliceChanged),
    ]


@pytest.mark.parametrize("content", ["", "---\n", "# only a comment\n", "---\n---\nnull\n"])
def test_a_file_without_documents_has_no_objects(content: str) -> None:
    assert events(content) == []


def test_an_invalid_object_names_the_line_of_its_document_and_the_others_count() -> None:
    bad = SERVICE.replace("port: 80", "port: many")
    first, second = events(f"{SERVICE}---\n{bad}")
    assert isinstance(first, ServiceChanged)
    assert isinstance(second, Invalid)
    assert second.name == "default/web"
    assert second.reason.startswith("a.yaml:8: spec.ports[0].port must be a whole number, not a string")


def test_an_object_without_a_name_is_named_by_file_and_line() -> None:
    event = only_invalid("---\nkind: Service\nspec: {clusterIP: 10.0.0.1}\n")
    assert event.name == "a.yaml:2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{SERVICE}---\na: [1,\nb: c\n", "a.yaml:9: "),
        ("a: b\n c: d\n", "a.yaml:2: mapping values are not allowed"),
        ("a: b\n\tc: d\n", "a.yaml:2: "),
        ("a: 1\nb: \x01\n", "a.yaml:2: control characters are not allowed"),
        (b"a: 1\nb: \xff\n", "a.yaml:2: invalid leading UTF-8 octet"),
        ("a: 1\n---\nb: *nowhere\n", "a.yaml:3: found undefined alias"),
        ("a: !!python/object:os.system x\n", "a.yaml:1: could not determine a constructor"),
        ("a: 1\n---\nb: !!bool perhaps\n", "a.yaml:3: KeyError"),
        ("a: 1\n[b]: c\n", "a.yaml:2: found unhashable key"),
        ("[" * 100_000, "a.yaml:1: nested deeper than 200 levels"),
        ("- " * 100_000, "a.yaml:1: nested deeper than 200 levels"),
        ("? " * 100_000, "a.yaml:1: nested deeper than 200 levels"),
        ("{a: " * 100_000, "a.yaml:1: nested deeper than 200 levels"),
    ],
)
def test_a_file_that_does_not_parse_is_named_with_its_line(content: str | bytes, message: str) -> None:
    with pytest.raises(Unreadable) as caught:
        events(content)
    assert caught.value.message.startswith(message), caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"kind":\n"Service",\n"a": x}', "a.json:3: "),
        (b'{"kind": "List",\n"items": [\n{},', "a.json:3: "),
        (b"", "a.json:1: "),
        (b"{}\n{}\n", "a.json:2: "),
        (b"[" * 100_000, "a.json:1: "),
        (b'{"kind": "Service", "metadata": {"name": "\n"}}', "a.json:1: "),
    ],
)
def test_a_json_file_that_does_not_parse_is_named_with_its_line(content: bytes, message: str) -> None:
    with pytest.raises(Unreadable) as caught:
        events(content, "a.json")
    assert caught.value.message.startswith(message), caught.value.message


def test_a_json_file_holds_one_object_or_a_list() -> None:
    objects = [service_object("web"), slice_object("web"), node_object("here"), node_object("there")]
    single = msgspec.json.encode(objects[0])
    many = msgspec.json.encode({"kind": "List", "apiVersion": "v1", "items": objects})
    assert [type(event) for event in events(b"\xef\xbb\xbf" + single, "a.json")] == [ServiceChanged]
    assert [type(event) for event in events(many, "a.json")] == [
        ServiceChanged,
        SliceChanged,
        NodeChanged,
        PeerChanged,
        PeerChanged,
    ]


def test_json_and_yaml_of_the_same_objects_give_the_same_events() -> None:
    raw = msgspec.json.encode({"kind": "List", "items": [service_object("web"), slice_object("web")]})
    assert events(raw, "a.json") == events(raw, "a.yaml")


def test_texts_that_look_like_something_else_in_yaml_stay_texts() -> None:
    content = f"""{SLICE}
- addresses: [10.1.0.1]
  nodeName: 2024-05-01
  hints: {{forZones: [{{name: on}}, {{name: no}}, {{name: 1:20}}, {{name: 08}}, {{name: 1_0}}, {{name: =}}]}}
"""
    (event,) = events(content)
    assert isinstance(event, SliceChanged)
    assert event.slice is not None
    (endpoint,) = event.slice.endpoints
    assert endpoint.node == "2024-05-01"
    assert endpoint.zones == {"on", "no", "1:20", "08", "1_0", "="}


def test_a_trigger_time_needs_no_quotes() -> None:
    note = "annotations: {endpoints.kubernetes.io/last-change-trigger-time: 1970-01-01T00:00:05Z}"
    (event,) = events(
        SLICE.replace("  name: web-1", f"  name: web-1\n  {note}") + "- addresses: [10.1.0.1]\n"
    )
    assert isinstance(event, SliceChanged)
    assert event.slice is not None
    assert event.slice.trigger_time == 5.0


def test_an_ipv6_address_needs_no_quotes() -> None:
    content = SLICE.replace("IPv4", "IPv6") + "- addresses:\n  - 1:2:3:4:5:6:7:8\n- addresses:\n  - fd00::1\n"
    (event,) = events(content)
    assert isinstance(event, SliceChanged)
    assert event.slice is not None
    assert [one.address for one in event.slice.endpoints] == [
        parse_address("1:2:3:4:5:6:7:8"),
        parse_address("fd00::1"),
    ]


def test_yaml_keys_that_are_not_strings_become_labels() -> None:
    content = SERVICE.replace(
        "{name: web}", "{name: web, labels: {on: a, 1: b, true: c, ~: d, 1.5: e, 2024-05-01: f}}"
    )
    (event,) = events(content)
    assert isinstance(event, ServiceChanged)
    assert event.name == name("web")


def test_numbers_are_read_as_kubectl_reads_them() -> None:
    for text, port in (("0x50", 80), ("0o120", 80), ("80", 80)):
        (event,) = events(SERVICE.replace("port: 80", f"port: {text}"))
        assert isinstance(event, ServiceChanged)
        assert event.service is not None
        assert event.service.ports[0].port == port
    assert "not a string" in only_invalid(SERVICE.replace("port: 80", "port: " + "9" * 5000)).reason


def test_aliases_and_merge_keys_are_expanded() -> None:
    content = f"""{SLICE}
- &first {{addresses: [10.1.0.1], nodeName: here, conditions: {{ready: false}}}}
- {{<<: *first, addresses: [10.1.0.2]}}
"""
    (event,) = events(content)
    assert isinstance(event, SliceChanged)
    assert event.slice is not None
    assert [(one.address, one.node, one.ready) for one in event.slice.endpoints] == [
        (parse_address("10.1.0.1"), "here", False),
        (parse_address("10.1.0.2"), "here", False),
    ]


@pytest.mark.timeout(20)
def test_aliases_that_expand_without_limit_are_invalid() -> None:
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
    )
    assert "JSON" in only_invalid(bomb).reason
    assert "JSON" in only_invalid("a: &a [*a]\n").reason
    merges = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12)
    )
    with contextlib.suppress(Unreadable):  # what it costs is bounded: PyYAML 6.0.4 merges each mapping once
        events(merges)


@given(
    st.binary(max_size=60) | st.text(alphabet="abk:[]{}-?&*!|>'\"#%@,\n 01<=~\\", max_size=60).map(str.encode)
)
def test_any_content_parses_or_raises_unreadable(content: bytes) -> None:
    for called in ("a.yaml", "a.json"):
        try:
            found = events(content, called)
        except Unreadable as error:
            message = error.message
            assert message.startswith(f"{called}:")
        else:
            assert all(one.name and one.reason for one in found if isinstance(one, Invalid))
