"""Only parts of the Kubernetes client are imported, in new processes each."""

import subprocess
import sys

import pytest

_LARGE = ("kubernetes.dynamic", "kubernetes.client.api_client", "pydantic", "requests", "oauthlib", "aiohttp")


def run(code: str) -> str:
    code = f"import sys; from ebpfproxy.api import client_modules as modules\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_pod_loads_nothing_that_is_large() -> None:
    """Otherwise it would need 20 MB more."""
    loaded = run("print(modules.load().Configuration().verify_ssl); print(*sys.modules)").split()
    assert loaded[0] == "True"
    assert {"kubernetes.config.incluster_config", "urllib3"} <= set(loaded)
    assert [name for name in _LARGE if name in loaded] == []


def test_a_kubeconfig_loads_neither_the_api_nor_pydantic() -> None:
    loaded = run("print(modules.kube_config().load_kube_config); print(*sys.modules)").split()
    assert "kubernetes.config.kube_config" in loaded
    assert [name for name in ("kubernetes.client.api_client", "pydantic") if name in loaded] == []


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("import kubernetes", id="imported-completely"),
        pytest.param("sys.modules['kubernetes.config.incluster_config'] = None", id="another-release"),
    ],
)
def test_otherwise_the_complete_client_is_used(before: str) -> None:
    code = f"{before}\nprint(modules.load().Configuration().verify_ssl, modules.kube_config().__name__)\n"
    found = run(code + "import kubernetes; print(kubernetes.client.CoreV1Api.__name__)")
    assert found.split() == ["True", "kubernetes.config.kube_config", "CoreV1Api"]


def test_threads_may_load_it_at_the_same_time() -> None:
    threads = "from concurrent.futures import ThreadPoolExecutor as Pool\n"
    count = "print(len({id(each.Configuration) for each in Pool(8).map(lambda _: modules.load(), range(8))}))"
    assert run(threads + count) == "1"
