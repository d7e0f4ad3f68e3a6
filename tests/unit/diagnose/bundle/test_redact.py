"""No secret is left in a support bundle, and what is no secret stays."""

import base64
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ebpfproxy.diagnose.bundle.redact import REDACTED, redact

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
]


@pytest.mark.parametrize("template", _TEMPLATES)
def test_a_secret_is_redacted(template: str) -> None:
    shown = redact(template.format(_SECRET))
    assert _SECRET not in shown
    assert REDACTED in shown


@given(
    template=st.sampled_from(_TEMPLATES[:17]),
    secret=st.binary(min_size=9, max_size=60).map(lambda raw: base64.urlsafe_b64encode(raw).decode()),
    before=st.sampled_from(["", "line\n", "level=info msg=x "]),
)
@example(template="run --token {} --v=2", secret="-AAAAAAAAAAA", before="")
@example(template="run --token {} --v=2", secret="--AAAAAAAAAA", before="")
def test_no_base64_secret_is_left(template: str, secret: str, before: str) -> None:
    assert secret not in redact(before + template.format(secret))


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
        "headers": {"Authorization": "Bearer abc", "Accept": "*"},
        "mode": "ebpf",
    }
    for indent in (None, 2):
        shown = json.loads(redact(json.dumps(content, indent=indent)))
        assert shown["mode"] == "ebpf"
        assert shown["metadata"] == {"annotations": REDACTED, "name": "web"}
        assert (shown["token"], shown["headers"]["Authorization"]) == (REDACTED, REDACTED)
        assert shown["headers"]["Accept"] == "*"
    yaml = "metadata:\n  annotations:\n    a: b\n  name: web\nspec: 1\n"
    assert redact(yaml) == f'metadata:\n  annotations: "{REDACTED}"\n  name: web\nspec: 1\n'


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
