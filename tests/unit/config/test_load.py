"""Flags beside a file: which of the two counts, and what is said of the other."""

from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.config import Config, Loaded
from ebpfproxy.config.load import IGNORED_FLAGS, Remark, load
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


def test_without_a_file_the_configuration_comes_from_flags() -> None:
    result = load({"masquerade_all": "true", "config": "", "kubeconfig": None})
    assert result.config == Config.parse({"masquerade_all": "true"})
    assert (result.remarks, result.content) == ((), None)


def test_a_flag_with_a_field_is_ignored_even_if_the_file_does_not_set_the_field(file: Path) -> None:
    flags = {"masquerade_all": "true", "sync_period": "5s", "nodeport_addresses": ("10.0.0.0/8",)}
    result = loaded(file, "iptables: {syncPeriod: 7s}", **flags)
    assert result.config == Config.parse({"config": str(file), "sync_period": "7s"})
    assert result.remarks == (
        Remark(
            IGNORED_FLAGS,
            {"flags": "--masquerade-all, --nodeport-addresses, --sync-period", "file": file},
        ),
    )


def test_the_deprecated_ports_are_ignored_if_there_is_a_file(file: Path) -> None:
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
def test_flags_for_the_node_name_and_logging_override_the_file(
    file: Path, option: str, flag: str, field: str
) -> None:
    result = loaded(file, field, **{option: flag})
    assert getattr(result.config, option) == OPTIONS[option].parse(flag)
    assert result.remarks == ()
    by_file = loaded(file, field).config
    assert getattr(by_file, option) != getattr(result.config, option)


def test_an_empty_hostname_override_does_not_override_the_file(file: Path) -> None:
    result = loaded(file, "hostnameOverride: by-file", hostname_override="")
    assert result.config.node_name == "by-file"


def test_an_option_without_a_field_comes_from_the_flag(file: Path) -> None:
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


def test_invalid_flags_and_invalid_fields_are_reported_together(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(file, "hostnameOverride: x\noomScoreAdj: 5000", bpffs_root="here", hostname_override=" ")
    assert caught.value.message.splitlines() == [
        "--hostname-override: the node name is blank; give a name, or leave it out to use the host name",
        '--bpffs-root: "here" is not an absolute path',
        f"{file}:4: oomScoreAdj: 5000 is not between -1000 and 1000",
    ]


def test_an_ignored_flag_is_not_checked(file: Path) -> None:
    assert loaded(file, "", oom_score_adj="junk").config.oom_score_adj == -999


def test_manifests_with_a_kubeconfig_in_the_file_are_rejected_with_both_names(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(file, "clientConnection: {kubeconfig: there}", manifests="services")
    assert caught.value.message == (
        f"--manifests: replaces the API server; leave {file}:3: clientConnection.kubeconfig out"
    )


def test_reload_uses_the_current_file_and_the_same_flags(file: Path) -> None:
    before = loaded(file, "mode: iptables", bpffs_root="/bpf")
    file.write_text(HEAD + "mode: nftables")
    after = before.reload()
    assert (before.config.proxy_mode, after.config.proxy_mode) == ("iptables", "nftables")
    assert after.config.bpffs_root == Path("/bpf")
    assert after.content == file.read_bytes() != before.content


def test_reload_reports_what_is_wrong_with_the_changed_file(file: Path) -> None:
    before = loaded(file, "mode: iptables")
    file.write_text("mode: [")
    with pytest.raises(ConfigError, match=r"config\.conf:1: "):
        before.reload()
    file.unlink()
    with pytest.raises(ConfigError, match="No such file or directory"):
        before.reload()
