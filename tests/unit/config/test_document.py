"""Configuration files as YAML: what is read, and what is rejected with its line."""

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.config import document
from ebpfproxy.config.document import is_zero, parse_document
from ebpfproxy.errors import ConfigError

PATH = Path("config.conf")


def parse(text: str) -> yaml.Node | None:
    return parse_document(PATH, text.encode())[0]


def rejection(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return caught.value.message


def test_a_syntax_error_is_reported_with_its_line() -> None:
    assert rejection("mode: iptables\nconntrack: {min: 1\n") == (
        "config.conf:2: did not find expected ',' or '}'"
    )
    assert rejection("mode: iptables\n\tx: y\n").startswith("config.conf:2: ")
    assert rejection("mode: \x00\n").startswith("config.conf:1: ")


def test_json_that_is_indented_with_tabs_is_parsed() -> None:
    node = parse('{\n\t"mode": "iptables",\n\t"conntrack": {"min": 1}\n}\n')
    assert isinstance(node, yaml.MappingNode)
    assert [key.value for key, _ in node.value] == ["mode", "conntrack"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "\n\n"])
def test_an_empty_file_has_no_document_or_a_null(text: str) -> None:
    node = parse(text)
    assert node is None or document.is_null(node)


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("a: 1\n", 0),
        ("---\na: 1\n---\n", 0),
        ("a: 1\n---\nb: 2\n", 1),
        ("a: 1\n---\n---\nb: 2\n---\nc: 3\n", 2),
    ],
)
def test_documents_after_the_first_are_counted_unless_empty(text: str, more: int) -> None:
    assert parse_document(PATH, text.encode())[1] == more


def test_aliases_are_rejected() -> None:
    assert (
        rejection("a: &x 1\nb: *x\n")
        == "config.conf:2: aliases (*name) are not supported; write the value out"
    )
    assert "aliases" in rejection("a: &x [*x]\n")


@pytest.mark.parametrize("text", ["[" * 31, "a: " + "[" * 30 + "]" * 30, "{a: " * 60_000, "[" * 200_000])
def test_nodes_nested_too_deep_are_rejected_before_libyaml_recurses(text: str) -> None:
    assert rejection(text) == "config.conf:1: nested deeper than 30 levels"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        document.read(tmp_path / "absent")
    assert (
        caught.value.message == f"cannot read configuration file {tmp_path}/absent: No such file or directory"
    )
    assert "--config" in caught.value.hint


def test_a_file_that_is_too_large_is_rejected(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b" " * (1 << 20))
    assert len(document.read(big)) == 1 << 20
    big.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="is larger than 1 MiB"):
        document.read(big)


@pytest.mark.parametrize(
    "text",
    ["null", "~", '""', "0", "0s", "0h0m0s", "false", "[]", "{}", "{a: 0s, b: [], c: {d: false}}"],
)
def test_a_zero_value_of_go_is_zero(text: str) -> None:
    node = parse(f"field: {text}")
    assert isinstance(node, yaml.MappingNode)
    assert is_zero(node.value[0][1])


@pytest.mark.parametrize(
    "text", ["1", "1s", "0s1ms", "true", "[0, 1]", "['']", "[0]", "{a: {b: x}}", "10", "hm", "-1"]
)
def test_a_value_that_is_not_a_zero_value_of_go_is_not_zero(text: str) -> None:
    node = parse(f"field: {text}")
    assert isinstance(node, yaml.MappingNode)
    assert not is_zero(node.value[0][1])


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="surrogatepass")))
def test_junk_is_parsed_or_rejected(content: bytes) -> None:
    with contextlib.suppress(ConfigError):
        parse_document(PATH, content)
