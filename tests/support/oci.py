"""Starts a pod like a Kubernetes container runtime: from the pod's spec to a bundle that crun runs.

Only the fields that this project's DaemonSet uses are supported; any other raises ValueError, so that no
field stays untested. The node is a lab's: its network namespace, and a folder for each mounted path of the
node. The process namespace is this machine's, because the pod has hostPID.

Sources: config.md, config-linux.md and runtime.md of the OCI Runtime Specification 1.0; the mounts are those
of containerd (pkg/cri, WithDefaultMounts, WithPrivilegedDevices), and for a container that is not privileged
its masked and read-only paths (pkg/oci, populateDefaultUnixSpec).
"""

import dataclasses
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebpfproxy.lab import Netns
from ebpfproxy.linux import mounts
from tests.support import seccomp

Object = dict[str, Any]

_SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"
_VARIABLE = re.compile(r"\$\(([A-Z_]+)\)")
_PROPAGATION = {"Bidirectional": "rshared", "HostToContainer": "rslave", "None": "rprivate"}
_OF_THE_RUNTIME: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("/proc", "proc", ("nosuid", "noexec", "nodev")),
    ("/dev", "tmpfs", ("nosuid", "strictatime", "mode=755")),
    ("/dev/pts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620")),
    ("/dev/shm", "tmpfs", ("nosuid", "noexec", "nodev", "mode=1777")),
    ("/sys", "sysfs", ("nosuid", "noexec", "nodev")),
)
_MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
    "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap",
)  # fmt: skip
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""Paths that containers see masked or read-only unless they are privileged."""
_CAPABILITIES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE "
    "NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT "
    "SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE "
    "AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ "
    "PERFMON BPF CHECKPOINT_RESTORE"
)
"""Capabilities by bit number (include/uapi/linux/capability.h)."""
_POD_FIELDS = frozenset({
    "containers", "dnsPolicy", "hostNetwork", "hostPID", "nodeSelector", "priorityClassName",
    "serviceAccountName", "terminationGracePeriodSeconds", "tolerations", "volumes",
})  # fmt: skip
_CONTAINER_FIELDS = frozenset({
    "args", "env", "image", "livenessProbe", "name", "ports", "readinessProbe", "resources",
    "securityContext", "startupProbe", "volumeMounts",
})  # fmt: skip
_CONTEXT_FIELDS = frozenset({
    "appArmorProfile", "capabilities", "privileged", "readOnlyRootFilesystem", "seccompProfile",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Image:
    """`root`: its file system. `entrypoint` and `environment`: from its configuration. `also`: further
    folders of this machine that it needs, with the same paths."""

    root: Path
    entrypoint: Sequence[str]
    environment: Mapping[str, str]
    also: Sequence[Path] = ()


@dataclasses.dataclass(frozen=True)
class Host:
    """The node's part of a pod. `paths`: replacements for the node's paths. `secrets`: the folder of the
    service account. `config_maps`: data by name. `api_host`, `api_port`: of the Service kubernetes."""

    netns: Netns
    name: str
    paths: Mapping[str, Path]
    secrets: Path
    config_maps: Mapping[str, Mapping[str, str]]
    api_host: str
    api_port: int


class Pod:
    """A bundle in a folder with the container's name. `make` creates it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def command(self) -> list[str]:
        """The command that runs the pod until its end, in the caller's cgroup."""
        return self._crun("run", f"--bundle={self._folder}", self._folder.name)

    def execution(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs another command in the running pod."""
        return self._crun("exec", self._folder.name, *arguments)

    def pid(self) -> int:
        """The id of its first process; 0 if it has ended."""
        done = subprocess.run(
            self._crun("state", self._folder.name), capture_output=True, text=True, check=False
        )
        return 0 if done.returncode else int(json.loads(done.stdout)["pid"])

    def update_config_map(self, volume: str, contents: Mapping[str, str]) -> Path:
        """Replace all files of a ConfigMap's volume at once, as the kubelet does: through a symbolic link
        that is replaced (pkg/volume/util/atomic_writer.go). Returns the volume's folder."""
        folder = self._folder / volume
        folder.mkdir(exist_ok=True)
        data = folder / f"..{len(list(folder.iterdir()))}"
        data.mkdir()
        for name, text in contents.items():
            (data / name).write_text(text)
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(f"..data/{name}")
        (folder / "..data_tmp").symlink_to(data.name)
        (folder / "..data_tmp").rename(folder / "..data")
        return folder

    def _crun(self, *arguments: str) -> list[str]:
        """crun rejects the hybrid cgroup layout, so it only sees cgroup v2."""
        unified = shlex.quote(str(mounts.cgroup2_root()))
        crun = ["crun", "--cgroup-manager=disabled", f"--root={self._folder.parent}/crun", *arguments]
        unify = f"test {unified} = /sys/fs/cgroup || mount --bind {unified} /sys/fs/cgroup"
        script = f"{unify}; exec {shlex.join(crun)}"
        return ["unshare", "--mount", "--propagation=unchanged", "sh", "-c", script]


def make(
    folder: Path,
    daemon_set: Object,
    image: Image,
    host: Host,
    args: Sequence[str] = (),
    more: Sequence[str] = (),
) -> Pod:
    """Create a pod of the DaemonSet in `folder`, which must not exist. `args` replaces the container's
    arguments; `more` is appended. Raises ValueError for unsupported fields.
    """
    spec = daemon_set["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    _check(spec, _POD_FIELDS)
    _check(container, _CONTAINER_FIELDS)
    _check(container["securityContext"], _CONTEXT_FIELDS)
    folder.mkdir()
    pod = Pod(folder)
    environment = _environment(container, host)
    variables = dict(each.split("=", 1) for each in environment)
    given = [_VARIABLE.sub(lambda found: variables[found[1]], each) for each in args or container["args"]]
    context = container["securityContext"]
    if not (spec["hostNetwork"] and spec["hostPID"]):
        raise ValueError("only pods with the node's network and processes are supported")
    privileged = bool(context.get("privileged"))
    capabilities = _all_capabilities() if privileged else _listed_capabilities(context["capabilities"])
    configuration: Object = {
        "ociVersion": "1.0.2",
        "process": {
            "args": [*image.entrypoint, *given, *more],
            "env": [*(f"{key}={value}" for key, value in image.environment.items()), *environment],
            "cwd": "/",
            "user": {"uid": 0, "gid": 0},
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {
            "path": str(_layered(folder, image.root)),
            "readonly": context.get("readOnlyRootFilesystem", False),
        },
        "mounts": _mount_points(pod, spec, container, image, host),
        "linux": {
            "namespaces": [
                {"type": "mount"},
                {"type": "ipc"},
                {"type": "network", "path": str(host.netns.netns)},
            ],
            "rootfsPropagation": "rshared",
        },
    }
    if not privileged:
        configuration["linux"] |= {"maskedPaths": _MASKED, "readonlyPaths": _READ_ONLY}
        if seccomp := _seccomp(context["seccompProfile"], frozenset(capabilities)):
            configuration["linux"]["seccomp"] = seccomp
    (folder / "config.json").write_text(json.dumps(configuration))
    return pod


def _layered(folder: Path, root: Path) -> Path:
    """The image's files with an overlay for the container, in which mount points are created."""
    own, merged = folder / "layer", folder / "root"
    for path in (own, merged):
        path.mkdir()
    _mount("-t", "tmpfs", "tmpfs", own)  # a layer must not be inside another one, and `root` may be /
    for path in (own / "upper", own / "work"):
        path.mkdir()
    _mount(
        "-t", "overlay", "-o", f"lowerdir={root},upperdir={own}/upper,workdir={own}/work", "overlay", merged
    )
    return merged


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def _check(value: Mapping[str, object], known: frozenset[str]) -> None:
    if unknown := value.keys() - known:
        raise ValueError(f"not supported: {', '.join(sorted(unknown))}")


def _all_capabilities() -> list[str]:
    """All capabilities of this process: a privileged container has all capabilities of its runtime."""
    status = Path("/proc/self/status").read_text()
    (bounding,) = re.findall(r"^CapBnd:\t([0-9a-f]+)$", status, re.MULTILINE)
    return [f"CAP_{name}" for bit, name in enumerate(_CAPABILITIES.split()) if int(bounding, 16) >> bit & 1]


def _listed_capabilities(wanted: Object) -> list[str]:
    """The capabilities of a container that drops all and adds some, except those that this machine does not
    have. Raises ValueError for other lists."""
    if wanted.get("drop") != ["ALL"]:
        raise ValueError("only containers that drop all capabilities are supported")
    known = set(_CAPABILITIES.split())
    if unknown := set(wanted["add"]) - known:
        raise ValueError(f"not capabilities: {', '.join(sorted(unknown))}")
    available = set(_all_capabilities())
    return [f"CAP_{name}" for name in wanted["add"] if f"CAP_{name}" in available]


def _seccomp(profile: Object, capabilities: frozenset[str]) -> Object:
    """The filter of a profile of Kubernetes: none if unconfined. Raises ValueError for other profiles."""
    match profile:
        case {"type": "Unconfined"}:
            return {}
        case {"type": "RuntimeDefault"}:
            return seccomp.runtime_default(capabilities)
        case _:
            raise ValueError(f"not supported: {profile}")


def _environment(container: Object, host: Host) -> list[str]:
    fields = {"spec.nodeName": host.name}
    found = {"KUBERNETES_SERVICE_HOST": host.api_host, "KUBERNETES_SERVICE_PORT": str(host.api_port)}
    for each in container["env"]:
        (source,) = each["valueFrom"].items()
        match source:
            case ("fieldRef", {"fieldPath": path}):
                found[each["name"]] = fields[path]
            case ("configMapKeyRef", {"name": name, "key": key}):
                found[each["name"]] = host.config_maps[name][key]
            case _:
                raise ValueError(f"not supported: {source}")
    return [f"{key}={value}" for key, value in found.items()]


def _mount_points(pod: Pod, spec: Object, container: Object, image: Image, host: Host) -> list[Object]:
    sources = {each["name"]: _volume(pod, each, host) for each in spec["volumes"]}
    privileged = bool(container["securityContext"].get("privileged"))
    points: list[Object] = [
        {"destination": where, "type": kind, "source": kind, "options": list(options)}
        for where, kind, options in _OF_THE_RUNTIME
    ]
    if not privileged:
        points[-1]["options"].append("ro")
    for each in container["volumeMounts"]:
        _check(each, frozenset({"mountPath", "mountPropagation", "name", "readOnly"}))
        if each.get("mountPropagation") == "Bidirectional" and not privileged:
            raise ValueError("the API server admits Bidirectional mounts in privileged containers only")
        options = ["rbind", "ro" if each.get("readOnly") else "rw"]
        options.append(_PROPAGATION[each.get("mountPropagation", "None")])
        points.append(_bind(sources[each["name"]], each["mountPath"], options))
    points.append(_bind(host.secrets, _SECRETS, ["rbind", "ro", "rprivate"]))
    points += [_bind(path, str(path), ["rbind", "ro", "rprivate"]) for path in image.also]
    return points


def _bind(source: Path, where: str, options: list[str]) -> Object:
    return {"destination": where, "type": "bind", "source": str(source), "options": options}


def _volume(pod: Pod, volume: Object, host: Host) -> Path:
    """The folder or file on this machine for a volume."""
    match volume:
        case {"hostPath": {"path": path, "type": kind}}:
            source = host.paths[path]
            if kind == "FileOrCreate":
                source.touch()
            elif kind == "DirectoryOrCreate":
                source.mkdir(parents=True, exist_ok=True)
            elif kind != "Directory" or not source.is_dir():
                raise ValueError(f"{source} is no {kind}")
            return source
        case {"configMap": {"name": name, "items": items}}:
            contents = {each["path"]: host.config_maps[name][each["key"]] for each in items}
            return pod.update_config_map(volume["name"], contents)
        case _:
            raise ValueError(f"not supported: {volume}")
