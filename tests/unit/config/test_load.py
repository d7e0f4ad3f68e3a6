"""Flags beside a file: which of the two counts, and what is said of the other."""

from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.config import Config, Loaded
from ebpfproxy.config.load import load
from ebpfproxy.config.remark import Remark
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.errors import ConfigError

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.conf"


def loaded(file: Path, said: str, **flags: Any) -> Loaded:
    file.write_text(HEAD + said)
    return load({"config": str(file), **flags})


def idle_flags(result: Loaded) -> list[object]:
    return [remark.values["flags"] for remark in result.remarks if "flags" in remark.values]


def test_without_a_file_the_flags_are_all() -> None:
    result = load({"masquerade_all": "true", "config": "", "kubeconfig": None})
    assert result.config == Config.parse({"masquerade_all": "true"})
    assert (result.remarks, result.content) == ((), None)


def test_what_has_a_field_is_taken_from_the_file_even_where_that_says_nothing_of_it(file: Path) -> None:
    flags = {"masquerade_all": "true", "sync_period": "5s", "nodeport_addresses": ("10.0.0.0/8",)}
    result = loaded(file, "iptables: {syncPeriod: 7s}", **flags)
    assert result.config == Config.parse({"config": str(file), "sync_period": "7s"})
    assert result.remarks == (
        Remark(
            "flags are not looked at, since the configuration file counts",
            {"flags": "--masquerade-all, --nodeport-addresses, --sync-period", "file": file},
        ),
    )


def test_the_deprecated_ports_are_not_looked_at_beside_a_file(file: Path) -> None:
    result = loaded(file, "", healthz_port="0", metrics_port="0")
    assert result.config.healthz_listen == ("0.0.0.0", 10256)
    assert idle_flags(result) == ["--healthz-port, --metrics-port"]


@pytest.mark.parametrize(
    ("option", "flag", "field"),
    [
        ("hostname_override", "by-flag", "hostnameOverride: by-file"),
        ("verbosity", "4", "logging: {verbosity: 2}"),
        ("verbosity", "0", "logging: {verbosity: 2}"),
        ("logging_format", "json", "logging: {format: text}"),
    ],
)
def test_the_nodes_name_and_logging_are_the_flags_if_they_are_given(
    file: Path, option: str, flag: str, field: str
) -> None:
    result = loaded(file, field, **{option: flag})
    assert getattr(result.config, option) == OPTIONS[option].parse(flag)
    assert result.remarks == ()
    by_file = loaded(file, field).config
    assert getattr(by_file, option) != getattr(result.config, option)


def test_an_empty_name_of_the_node_leaves_it_to_the_file(file: Path) -> None:
    result = loaded(file, "hostnameOverride: by-file", hostname_override="")
    assert result.config.node_name == "by-file"


def test_what_has_no_field_is_the_flags(file: Path) -> None:
    flags = {
        "master": "https://192.0.2.1",
        "cleanup": "true",
        "write_config_to": "there",
        "bpffs_root": "/bpf",
        "iptables_backend": "legacy",
        "min_sync_period": "2s",
    }
    result = loaded(file, "mode: iptables", **flags)
    assert result.config == Config.parse({"config": str(file), "proxy_mode": "iptables", **flags})
    assert result.remarks == ()


def test_a_flag_that_is_wrong_is_named_beside_a_field_that_is(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(file, "hostnameOverride: x\noomScoreAdj: 5000", bpffs_root="here", hostname_override=" ")
    assert caught.value.message.splitlines() == [
        "--hostname-override: the name of the node is blank",
        '--bpffs-root: "here" is not an absolute path',
        f"{file}:4: oomScoreAdj: 5000 is not between -1000 and 1000",
    ]


def test_a_flag_that_does_not_count_is_not_checked(file: Path) -> None:
    assert loaded(file, "", oom_score_adj="junk").config.oom_score_adj == -999


def test_manifests_beside_a_kubeconfig_of_the_file_are_refused_by_name(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(file, "clientConnection: {kubeconfig: there}", manifests="services")
    assert caught.value.message == (
        f"--manifests: stands in for an API server, so leave {file}:3: clientConnection.kubeconfig out"
    )


def test_again_is_the_file_as_it_is_now_with_the_same_flags(file: Path) -> None:
    before = loaded(file, "mode: iptables", bpffs_root="/bpf")
    file.write_text(HEAD + "mode: nftables")
    after = before.again()
    assert (before.config.proxy_mode, after.config.proxy_mode) == ("iptables", "nftables")
    assert after.config.bpffs_root == Path("/bpf")
    assert after.content == file.read_bytes() != before.content


def test_again_says_what_is_wrong_with_the_file_that_was_good(file: Path) -> None:
    before = loaded(file, "mode: iptables")
    file.write_text("mode: [")
    with pytest.raises(ConfigError, match=r"config\.conf:1: "):
        before.again()
    file.unlink()
    with pytest.raises(ConfigError, match="No such file or directory"):
        before.again()
