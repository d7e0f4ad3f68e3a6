"""Flags typed as for a Go program."""

from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.config import Config, FlagsCommand, Loaded, config_options, loaded_options, options
from ebpfproxy.config.command import FLAGS_WITHOUT_EFFECT
from ebpfproxy.config.load import GATES_WITHOUT_EFFECT, Remark
from ebpfproxy.config.settings import OPTIONS
from ebpfproxy.errors import ConfigError


@click.command("probe", cls=FlagsCommand)
@config_options
def whole(config: Config) -> Config:
    """All options."""
    return config


@click.command("dump", cls=FlagsCommand)
@options("bpffs_root", "nodeport_addresses", "verbosity")
@click.option("-o", "--output", default="text", help="The form.")
@click.option("--watch", is_flag=True, help="Again and again.")
@click.argument("maps", nargs=-1)
def some(**given: Any) -> dict[str, Any]:
    """A few options, and some of its own."""
    return given


@click.command("loaded", cls=FlagsCommand)
@loaded_options
def loaded(loaded: Loaded) -> Loaded:
    """All options, and remarks."""
    return loaded


def read(*args: str) -> Config:
    config = whole.main(list(args), standalone_mode=False)
    assert isinstance(config, Config)
    return config


def read_some(*args: str) -> dict[str, Any]:
    given = some.main(list(args), standalone_mode=False)
    assert isinstance(given, dict)
    return given


@pytest.mark.parametrize(
    "args",
    [
        ["--sync-period=1m30s"],
        ["--sync-period", "1m30s"],
        ["--sync_period=1m30s"],
        ["--sync_period", "1m30s"],
    ],
)
def test_a_value_follows_an_equals_sign_or_is_the_next_word(
    args: list[str],
) -> None:
    assert read(*args).sync_period == 90.0


@pytest.mark.parametrize("args", [["-v=4"], ["-v", "4"], ["-v4"], ["--v=4"], ["--v", "4"]])
def test_five_spellings_of_the_verbosity_flag_are_accepted(args: list[str]) -> None:
    assert read(*args).verbosity == 4


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], False),
        (["--masquerade-all"], True),
        (["--masquerade-all=true"], True),
        (["--masquerade-all=false"], False),
    ],
)
def test_a_boolean_has_no_value_or_one_after_an_equals_sign(args: list[str], expected: bool) -> None:
    assert read(*args).masquerade_all is expected


def test_a_boolean_that_is_true_can_be_switched_off() -> None:
    assert read("--iptables-localhost-nodeports=0").iptables_localhost_nodeports is False


def test_a_boolean_never_takes_the_next_word() -> None:
    with pytest.raises(click.UsageError, match="unexpected extra argument"):
        read("--masquerade-all", "false")
    config = read("--masquerade-all", "--cleanup")
    assert (config.masquerade_all, config.cleanup) == (True, True)


def test_a_value_may_begin_with_a_dash() -> None:
    assert read("--oom-score-adj", "-5").oom_score_adj == -5
    assert read("--oom-score-adj=-5").oom_score_adj == -5


def test_an_empty_value_differs_from_a_missing_value() -> None:
    assert read("--healthz-bind-address=").healthz_listen is None
    assert read("--healthz-bind-address", "").healthz_listen is None


def test_lists_are_comma_separated_and_repeatable() -> None:
    config = read("--nodeport-addresses=10.0.0.0/8,fd00::/8", "--nodeport-addresses", "192.168.0.0/16")
    assert len(config.node_port_cidrs) == 3


def test_of_a_flag_given_twice_the_last_counts() -> None:
    assert read("-v=1", "--v=3").verbosity == 3


def test_an_unknown_flag_is_named_with_a_similar_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        read("--proxy-mod=ebpf")
    assert caught.value.message == "unknown flag: --proxy-mod"
    assert caught.value.hint == "did you mean --proxy-mode?"


def test_a_flag_that_kube_proxy_has_removed_gets_a_hint_to_leave_it_out() -> None:
    with pytest.raises(ConfigError) as caught:
        read("--cleanup-ipvs=true")
    assert caught.value.message == "unknown flag: --cleanup-ipvs"
    assert "leave it out" in caught.value.hint


_FLAGS = """
--add_dir_header --alsologtostderr --bind-address=0.0.0.0 --bind-address-hard-fail --boot-id-file=/x
--cluster-cidr=10.0.0.0/8 --config-sync-period=15m --conntrack-max-per-core=1 --conntrack-min=1
--conntrack-tcp-be-liberal --conntrack-tcp-timeout-close-wait=1h
--conntrack-tcp-timeout-established=1h --conntrack-udp-timeout=0s --conntrack-udp-timeout-stream=0s
--detect-local-mode=ClusterCIDR --feature-gates=ContextualLogging=true,AllAlpha=false
--healthz-bind-address=0.0.0.0:10256 --healthz-port=10256 --hostname-override=n
--iptables-localhost-nodeports --iptables-masquerade-bit=14 --iptables-min-sync-period=1s
--iptables-sync-period=30s --ipvs-exclude-cidrs=10.0.0.0/8 --ipvs-min-sync-period=1s
--ipvs-scheduler=rr --ipvs-strict-arp --ipvs-sync-period=30s --ipvs-tcp-timeout=0s
--ipvs-tcpfin-timeout=0s --ipvs-udp-timeout=0s --kube-api-burst=10 --kube-api-content-type=x
--kube-api-qps=5 --kubeconfig=/x --log-flush-frequency=5s --log-json-info-buffer-size=0
--log-json-split-stream --log-text-info-buffer-size=0 --log-text-split-stream --log_backtrace_at=:0
--log_dir=/x --log_file=/x --log_file_max_size=1 --logging-format=text --logtostderr
--machine-id-file=/x --masquerade-all --master=https://x --metrics-bind-address=127.0.0.1:10249
--metrics-port=10249 --nodeport-addresses=10.0.0.0/8 --one_output --oom-score-adj=-999
--pod-bridge-interface=br --pod-interface-name-prefix=veth --profiling --proxy-mode=iptables
--proxy-port-range= --show-hidden-metrics-for-version=1.33 --skip_headers --skip_log_headers
--stderrthreshold=2 --v=2 --vmodule=a=1
"""
KUBE_PROXYS = _FLAGS.split()
"""The flags of kube-proxy 1.29 to 1.34, except those that end it: cleanup, init-only, version and others."""


@pytest.mark.parametrize("flag", KUBE_PROXYS)
def test_every_flag_of_kube_proxy_is_accepted(flag: str) -> None:
    read(flag)
    if "=" in flag:
        read(*flag.split("=", 1))


def test_all_flags_of_kube_proxy_together_are_accepted() -> None:
    assert read(*KUBE_PROXYS).hostname_override == "n"


def test_one_remark_names_the_flags_without_effect() -> None:
    given = loaded.main(
        ["--proxy-port-range", "1-2", "--one-output", "-v=1", "--one-output=0"], standalone_mode=False
    )
    (remark,) = given.remarks
    assert remark == (FLAGS_WITHOUT_EFFECT, {"flags": "--proxy-port-range, --one-output"})


def test_a_flag_of_feature_gates_may_be_repeated_and_the_last_value_of_a_gate_counts() -> None:
    given = loaded.main(
        [
            "--feature-gates=A=true, AllowServiceExternalIPs=true,",
            "--feature-gates=AllowServiceExternalIPs=0",
        ],
        standalone_mode=False,
    )
    assert not given.config.allow_external_ips
    assert given.remarks == (Remark(GATES_WITHOUT_EFFECT, {"gates": "A"}),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A", '"A" is not a feature gate with its value, such as A=true'),
        ("=true", '"=true" is not a feature gate with its value, such as A=true'),
        ("A=maybe", 'A: "maybe" is neither true nor false'),
    ],
)
def test_an_invalid_feature_gate_is_rejected(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(f"--feature-gates={text}")
    assert caught.value.message == f"--feature-gates: {problem}"


def test_flags_without_effect_are_not_in_the_help() -> None:
    assert "proxy-port-range" not in whole.get_help(click.Context(whole))


@pytest.mark.parametrize("flag", ["--sync-period", "--iptables-sync-period", "--ipvs-sync-period"])
def test_sync_period_has_the_flags_of_ebpfproxy_and_kube_proxy(flag: str) -> None:
    assert read(f"{flag}=5s").sync_period == 5.0
    assert read("--sync-period=9s", "--iptables-sync-period=9s", f"{flag}=7s").sync_period == 7.0


def test_flags_cannot_be_abbreviated() -> None:
    with pytest.raises(ConfigError, match="unknown flag: --proxy"):
        read("--proxy=ebpf")


@pytest.mark.parametrize("args", [["word"], ["--", "--cleanup"]])
def test_a_positional_argument_is_rejected(args: list[str]) -> None:
    with pytest.raises(click.UsageError, match="unexpected extra argument"):
        read(*args)


@pytest.mark.parametrize("flag", ["--sync-period", "-v"])
def test_a_missing_value_is_rejected(flag: str) -> None:
    with pytest.raises(click.UsageError, match="requires an argument"):
        read(flag)


def test_a_command_with_a_few_options_gets_their_values_by_name() -> None:
    given = read_some("services", "--bpffs-root=/bpf", "-o=json", "--watch", "-v4", "slots")
    assert given.pop("nodeport_addresses").networks == ()
    assert given == {
        "bpffs_root": Path("/bpf"),
        "verbosity": 4,
        "output": "json",
        "watch": True,
        "maps": ("services", "slots"),
    }


def test_a_command_with_a_few_options_has_their_defaults_and_checks() -> None:
    assert read_some()["bpffs_root"] == Config().bpffs_root
    with pytest.raises(ConfigError, match=r"(?s)--bpffs-root: .*--v: "):
        read_some("--bpffs-root=here", "-v=x")


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "sync_period": st.integers(1, 10**6).map(lambda n: f"{n}ms"),
            "oom_score_adj": st.integers(-1000, 1000).map(str),
            "master": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            "masquerade_all": st.sampled_from(["true", "false"]),
            "ebpf_slots_max": st.integers(1, 1 << 26).map(str),
        },
    ),
    st.booleans(),
)
def test_a_command_line_parses_to_the_same_configuration_as_its_texts(
    texts: dict[str, str], glued: bool
) -> None:
    args: list[str] = []
    for name, text in texts.items():
        flag = OPTIONS[name].flag
        args += [f"{flag}={text}"] if glued or OPTIONS[name].kind.boolean else [flag, text]
    assert read(*args) == Config.parse(texts)


def test_the_help_shows_every_option_once_under_its_group() -> None:
    text = whole.get_help(click.Context(whole, info_name="probe"))
    first_words = [line.split(", --")[0].split()[0] for line in text.splitlines() if line.startswith("  -")]
    assert sorted(first_words) == sorted(["--help", *(option.flags[0] for option in OPTIONS.values())])
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "Options:",
        "The configuration file:",
        "The cluster and this node:",
        "Traffic:",
        "Modes nftables, iptables and ipvs:",
        "Mode ipvs:",
        "Mode userspace:",
        "Mode ebpf (ebpfproxy's own):",
        "Role edge (ebpfproxy only):",
        "HTTP servers:",
        "The process:",
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_the_help_of_a_command_shows_its_own_options_first() -> None:
    text = some.get_help(click.Context(some, info_name="dump"))
    assert 0 < text.index("-o, --output") < text.index("--bpffs-root") < text.index("-v, --v")
