"""The filter of --address: how it is parsed, and which rows it admits."""

import pytest
from click.testing import CliRunner

from ebpfproxy.cli.dump import command
from ebpfproxy.cli.dump_sections import Filter, parse_address_filter
from ebpfproxy.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", ("", None)),
        ("10.96.0.1", ("10.96.0.1", None)),
        ("10.96.0.1:80", ("10.96.0.1", 80)),
        ("fd00::1", ("fd00::1", None)),
        ("fd00:0:0::1", ("fd00::1", None)),
        ("[fd00::1]", ("fd00::1", None)),
        ("[fd00::1]:80", ("fd00::1", 80)),
    ],
)
def test_an_address_filter_is_parsed_with_or_without_a_port(text: str, place: tuple[str, int | None]) -> None:
    assert parse_address_filter(text) == place


@pytest.mark.parametrize("text", ["web", "10.96.0", "10.96.0.1:http", "[fd00::1", ":80", "[]"])
def test_an_invalid_address_filter_is_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        parse_address_filter(text)


def test_an_address_filter_without_a_port_admits_all_ports() -> None:
    wanted = Filter("", *parse_address_filter("[fd00::1]"))
    row = {"service": "default/web:http", "address": "fd00::1", "port": 80}
    assert wanted.admits(row)
    assert not wanted.admits(row | {"address": "fd00::2"})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--diff", "--watch"], ("--diff", "--watch")),
        (["conntrack", "--diff"], ("--diff", "conntrack")),
        (["--diff", "--service=a/b"], ("--diff", "--service or --address")),
        (["--drift", "--watch"], ("--drift", "--watch")),
        (["--watch", "-o", "yaml"], ("--watch", "-o yaml")),
    ],
)
def test_flags_that_exclude_each_other_are_named(arguments: list[str], named: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"cannot combine {named[0]} with {named[1]}"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)
