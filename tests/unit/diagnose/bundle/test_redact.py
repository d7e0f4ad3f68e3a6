"""No secret is left in a support bundle, and what is no secret stays."""

import base64
import json
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ebpfproxy.diagnose.bundle.credentials import REDACTED
from ebpfproxy.diagnose.bundle.redact import redact, redact_json, redact_options
from tests.support.examples import examples

_KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\nDEF==\n-----END RSA PRIVATE KEY-----"
_JWT = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlIn0.c2lnbmF0dXJl"
_SECRET = "s3cr3tV4lue"

_TEMPLATES = [
    "token: {}",
    "    token: {}\n    server: https://api:6443",
    "password: '{}'",
    "  client-key-data: {}",
    "  client-certificate-data: {}",
    "  certificate-authority-data: {}",
    '{{"access_token": "{}", "a": 1}}',
    '{{"refresh-token":"{}"}}',
    "--token={}",
    "run --token {} --v=2",
    "--bootstrap-token={} --master=https://api",
    "Authorization: Bearer {}",
    "authorization: Basic {}",
    "GET / {{'Authorization': 'Bearer {}'}}",
    'E1125 request failed header="Authorization: Bearer {}"',
    "https://user:{}@10.0.0.1:6443/api",
    "https://{}@10.0.0.1:6443/api",
    "API_TOKEN={} command",
    '{{"metadata": {{"annotations": {{"example.com/a": "{}"}}, "name": "web"}}}}',
    "metadata:\n  annotations:\n    a: {}\n    b: |\n      x\n  name: web",
    "annotations: {{'a': {{'b': '{}'}}}}",
    "x-secret: {}",
    "Set-Cookie: {}",
    "token: |\n  {0}\n  {0}\nmode: ebpf",
    "- token: >-\n    {0}\n\n    {0}\n- mode: ebpf",
    "tokens:\n- {0}\n- {0}\nmode: ebpf",
    "  passwords:\n  - a: {}\n    b: c\n  mode: ebpf",
    "password: the {} words\nmode: ebpf",
    '"token": "two\n  {} lines"\nmode: ebpf',
    "passwords: [{0}, {{a: '{0}'}}]\nmode: ebpf",
    '{{"tokens": ["{0}", {{"a": "{0}"}}], "mode": "ebpf"}}',
    '{{"a": {{"token": {{"b": "{}"',
    'error="bad {{\\"token\\":\\"{}\\"}}" mode=ebpf',
    'error="token: |\\n  {}" mode=ebpf',
    "GET https://api:6443/api?access_token={}&watch=true",
    "GET /api?watch=true&sig={} HTTP/1.1",
    "https://a/login#id_token={}",
    "curl -u user:{} https://a",
    "curl -uuser:{} https://a",
    'curl --user "user:{} x" https://a',
    "curl --proxy-user=user:{} https://a",
    'curl -H "X-Api: {}" https://a',
    "curl --header X-Api:{} https://a",
    'curl -b "a=1; b={}" https://a',
    '["curl", "-u", "user:{}", "https://a"]',
    '["run", "--token", "{}"]',
    "args:\n- --token\n- {}\n- --v=2",
    "args:\n  - --token={}\n  - --v=2",
    "sshpass -p {} ssh a",
    "mysql -h a -p{} web",
    "docker login -u me -p {} registry",
    "openssl rsa -passin pass:{}",
    "PGPASSWORD={} psql",
    "env:\n- name: DB_PASSWORD\n  value: {}\n- name: A\n  value: b",
    '{{"env": [{{"value": "{}", "name": "DB_PASSWORD"}}]}}',
    "apiVersion: v1\nkind: Secret\nmetadata:\n  name: web\ndata:\n  any: {}\nstringData:\n  other: |\n    {}",
    "apiVersion: v1\nkind: Config\nusers:\n- name: a\n  user:\n    any: {}\n",
    "data:\n  any: {}",
    "X-Auth-Token: {}",
    'Authorization: Digest username="u", response="{}"',
    'Cookie: a=1; b="{}"',
]


@pytest.mark.parametrize("template", _TEMPLATES)
def test_a_secret_is_redacted(template: str) -> None:
    """Bug: lists, blocks of YAML, parameters of URLs and curl -u stayed."""
    for before in ("", "2026-01-01T00:00:00Z stdout F ", "a\n", "  nested:\n"):
        for after in ("", "\n", "\n2026-01-01T00:00:01.000Z INFO Synced services services=12\n"):
            if "\n" in template and before[-1:] not in ("", "\n"):
                continue  # YAML in several lines is not written behind a prefix
            shown = redact(before + template.format(*[_SECRET] * 3) + after)
            assert _SECRET not in shown
            assert REDACTED in shown


@settings(max_examples=examples(1000))
@given(
    template=st.sampled_from(_TEMPLATES),
    secret=st.binary(min_size=9, max_size=60).map(lambda raw: base64.urlsafe_b64encode(raw).decode()),
    before=st.sampled_from(["", "line\n", "level=info msg=x\n"]),
)
@example(template="run --token {} --v=2", secret="-AAAAAAAAAAA", before="")
@example(template="run --token {} --v=2", secret="--AAAAAAAAAA", before="")
def test_no_base64_secret_is_left(template: str, secret: str, before: str) -> None:
    assert secret not in redact(before + template.format(*[secret] * 3))


def test_a_flag_behind_a_flag_without_a_value_stays() -> None:
    assert (
        redact("--show-token --v=2 --token --kubeconfig /etc/a")
        == "--show-token --v=2 --token --kubeconfig /etc/a"
    )


@pytest.mark.parametrize("text", [_KEY, f'"key": "{_KEY}"', _KEY.partition("-----END")[0]])
def test_a_key_is_redacted_even_if_truncated(text: str) -> None:
    assert "MIIE" not in redact(text)


def test_a_token_of_a_service_account_is_redacted_anywhere() -> None:
    assert redact(f"failed with {_JWT} of x") == f"failed with {REDACTED} of x"


def test_what_follows_a_secret_stays() -> None:
    content = {
        "metadata": {"annotations": {"a": "}{", "b": {"c": 1}}, "name": "web"},
        "token": "abc",
        "error": "Bearer abcdefghijk",
        "mode": "ebpf",
    }
    for indent in (None, 2):
        shown = json.loads(redact(json.dumps(content, indent=indent)))
        assert shown["mode"] == "ebpf"
        assert shown["metadata"] == {"annotations": REDACTED, "name": "web"}
        assert (shown["token"], shown["error"]) == (REDACTED, f"Bearer {REDACTED}")
    text = "metadata:\n  annotations:\n    a: b\n  name: web\nspec: 1\n"
    assert redact(text) == f'metadata:\n  annotations: "{REDACTED}"\n  name: web\nspec: 1\n'
    text = "token: |\n  a\n  b\nmode: ebpf\n2026-01-01 token=abc Synced services=12\n"
    expected = f'token: "{REDACTED}"\nmode: ebpf\n2026-01-01 token={REDACTED} Synced services=12\n'
    assert redact(text) == expected
    text = "curl -u a:b https://c/?watch=true&t=d --v=2\n"
    assert redact(text) == f"curl -u {REDACTED} https://c/?watch=true&t={REDACTED} --v=2\n"


def test_a_line_of_the_log_in_json_keeps_its_members() -> None:
    record = {"ts": 1.5, "level": "info", "msg": "Synced services", "services": "12", "token": "abc"}
    expected = record | {"token": REDACTED}
    assert json.loads(redact(json.dumps(record))) == expected


def test_a_service_in_yaml_keeps_what_is_no_secret() -> None:
    """And so does each object of a list."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "annotations": {"a": _SECRET}, "labels": {"own": _SECRET}},
        "spec": {"clusterIPs": ["10.96.0.1"], "ports": [{"name": "http", "port": "80"}], "other": [_SECRET]},
    }
    kept = service | {
        "metadata": {"name": "web", "annotations": REDACTED, "labels": {"own": REDACTED}},
        "spec": {"clusterIPs": ["10.96.0.1"], "ports": [{"name": "http", "port": "80"}], "other": REDACTED},
    }
    listed = {"apiVersion": "v1", "items": [service, service], "kind": "List"}
    for value, expected in ((service, kept), (listed, listed | {"items": [kept, kept]})):
        shown = redact(f"before\n---\n{yaml.dump(value)}---\nafter\n")
        assert shown.startswith("before\n---\n")
        assert shown.endswith("---\nafter\n")
        assert yaml.load(shown.split("---\n")[1], yaml.BaseLoader) == expected


_NAMES = st.sampled_from(["mode", "service", "value", "token", "my-password", "args", "x"])
_STRUCTURES = st.recursive(
    st.sampled_from([_SECRET, 5, None, True]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=8,
)


def _same(value: Any, shown: Any) -> bool:
    """Whether only members that are not harmless were replaced."""
    if isinstance(value, dict):
        pairs = [(name in ("mode", "service"), each, shown[name]) for name, each in value.items()]
        return all(_same(each, kept) if known else kept == REDACTED for known, each, kept in pairs)
    if isinstance(value, list):
        return all(map(_same, value, shown))
    return bool(value == shown)


@settings(max_examples=examples(400))
@given(_STRUCTURES)
def test_json_keeps_only_members_that_are_known_to_be_harmless(value: Any) -> None:
    shown = json.loads(redact_json(json.dumps(value), {"mode", "service"}))
    assert _same(value, shown)


@settings(max_examples=examples(400))
@given(
    st.dictionaries(st.sampled_from(["token", "my-password", "x-secret"]), _STRUCTURES, min_size=1),
    st.booleans(),
)
def test_nothing_below_the_name_of_a_credential_stays(value: dict[str, Any], flow: bool) -> None:
    """In JSON and in YAML, in one line and in several, between lines of a log."""
    for text in (json.dumps(value), json.dumps(value, indent=2), yaml.dump(value, default_flow_style=flow)):
        for before in ("", "2026-01-01T00:00:00Z INFO Synced services services=12\n"):
            shown = redact(f"{before}{text}\n2026-01-01T00:00:01Z INFO Synced\n")
            assert _SECRET not in shown
            assert shown.startswith(before)


def test_json_that_is_damaged_is_free_text() -> None:
    assert redact_json('{"token": "abc", "mode": "eb', {"mode"}) == f'{{"token": "{REDACTED}", "mode": "eb'


def test_only_values_of_known_options_stay() -> None:
    text = f"Warning: a\n--mode=ebpf\n--master=https://me:{_SECRET}@a\nother={_SECRET}\nmode=x\n"
    expected = f"Warning: a\n--mode=ebpf\n--master=https://{REDACTED}@a\nother={REDACTED}\nmode=x\n"
    assert redact_options(text, {"mode", "master"}) == expected


@pytest.mark.parametrize(
    "part",
    ['{"', '{"a":', "token=[", "a", "a.b-", "token", "- ", 'token="', "\\", "mysql ", "?a", "name: token "],
)
def test_no_text_takes_long(part: str) -> None:
    """Each would take minutes if a search began again at each position. The test has a time limit."""
    redact(part * (300_000 // len(part)))


@pytest.mark.parametrize(
    "text",
    [
        "--kubeconfig=/etc/kubernetes/kubelet.conf --proxy-mode=ebpf",
        '{"service": "default/token-server:http", "address": "10.96.0.1"}',
        "service=default/secret-store:http msg=Synced services=12",
        "10:00 Synced services duration=0.2 endpoints=3",
        "eyJust a word",
        "token: null",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text
