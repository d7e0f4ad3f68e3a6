"""The seccomp filter that container runtimes apply by default: that of CRI-O and podman, in a Debian package.

The file is in the format of containers-common (seccomp.json(5)). The kubelet applies it to containers with
the profile RuntimeDefault. containerd's filter has the same origin and the same rules for capabilities.
"""

import functools
import json
import platform
from collections.abc import Mapping
from typing import Any

from tests.support import extracted

_FILE = "/usr/share/containers/seccomp.json"
_ARCHITECTURES = {"x86_64": ("SCMP_ARCH_X86_64", "amd64"), "aarch64": ("SCMP_ARCH_AARCH64", "arm64")}


@functools.cache
def _profile() -> Any:
    return json.loads(extracted.path(_FILE).read_text())


def runtime_default(capabilities: frozenset[str]) -> dict[str, Any]:
    """The filter of a container with these capabilities, as `linux.seccomp` of an OCI configuration."""
    profile = _profile()
    architecture, name = _ARCHITECTURES[platform.machine()]
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": [architecture],
        "syscalls": [
            {key: rule[key] for key in ("names", "action", "errnoRet", "args") if rule.get(key) is not None}
            for rule in profile["syscalls"]
            if _applies(rule, capabilities, name)
        ],
    }


def _applies(rule: Mapping[str, Any], capabilities: frozenset[str], architecture: str) -> bool:
    includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
    return not (
        (includes.get("caps") and not capabilities.issuperset(includes["caps"]))
        or (includes.get("arches") and architecture not in includes["arches"])
        or capabilities.intersection(excludes.get("caps") or ())
        or architecture in (excludes.get("arches") or ())
    )
