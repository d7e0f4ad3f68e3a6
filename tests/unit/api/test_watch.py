"""The configuration of the API source: what is rejected, and in what words."""

import subprocess
import sys
from pathlib import Path

import pytest

from ebpfproxy.api.watch import load_configuration
from ebpfproxy.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["", "just words", "[1, 2]", "{", "clusters: 3", "users: [x]\ncontexts: [y]"]
)
def test_an_invalid_kubeconfig_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"kubeconfig") as caught:
        load_configuration(str(path), "")
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_kubeconfig_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent: No such file"):
        load_configuration(str(tmp_path / "absent"), "")


def test_outside_a_pod_and_without_kubeconfig_the_hint_names_the_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError) as caught:
        load_configuration("", "")
    assert "--kubeconfig" in caught.value.hint


def test_a_master_that_is_not_a_url_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:6443"):
        load_configuration("", "10.0.0.1:6443")


def test_the_client_is_not_imported_with_the_module() -> None:
    """An agent that reads manifests does not need it."""
    code = "import sys, ebpfproxy.api.watch; print('kubernetes' in sys.modules, 'urllib3' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
