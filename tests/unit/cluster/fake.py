"""Runs in place of kind, kubectl, helm, docker and ginkgo, under each of these names.

It writes its words and its standard input as a line of JSON to the file CALLS, and what the callers read.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

JUNIT = """<testsuites><testsuite>
<testcase name="[It] [sig-network] Services should serve"/>
<testcase name="[It] [sig-network] DNS should resolve"><failure message="no answer">long</failure></testcase>
<testcase name="[It] [sig-network] Proxy needs GCE"><skipped message="skipped - only gce"/></testcase>
<testcase name="[It] [sig-network] Services [Serial]"><skipped message="skipped"/></testcase>
<testcase name="[SynchronizedBeforeSuite]"/>
</testsuite></testsuites>"""
NAMED = {"nodes": ["a", "b"], "pods": ["ebpfproxy-a", "ebpfproxy-b"]}


def items(kind: str) -> str:
    return json.dumps({"items": [{"metadata": {"name": name}} for name in NAMED[kind]]})


def answer(name: str, words: list[str]) -> str:
    """What the program prints."""
    match name, [word for word in words if not word.startswith("--")]:
        case "kubectl", ["version", *_]:
            return json.dumps({"serverVersion": {"gitVersion": "v1.36.4+k3s1"}})
        case "kubectl", ["get", "endpointslices", *_]:
            endpoint = {"endpoints": [{"addresses": ["192.0.2.7"]}], "ports": [{"port": 6443}]}
            return json.dumps({"items": [endpoint]})
        case "kubectl", ["get", "daemonset", found, *_]:
            return f"daemonset.apps/{found}" if found == os.environ.get("DAEMONSET") else ""
        case "kubectl", ["get", kind, *_]:
            return items(kind)
        case "kubectl", ["exec", *_]:
            return os.environ.get("MODE") or mode()
        case "kind", ["get", "nodes"]:
            return "a b"
        case "kind", ["get", "clusters"]:
            return os.environ.get("CLUSTERS", "")
        case "docker", ["create", *_]:
            return "0123abcd"
        case "docker", ["cp", _, target]:
            shutil.copy(__file__, target)
        case "ginkgo", _:
            (report,) = [word.partition("=")[2] for word in words if word.startswith("--report-dir=")]
            Path(report, "junit_01.xml").write_text(JUNIT)
    return ""


def mode() -> str:
    """The mode of the last installation."""
    calls = [json.loads(line) for line in Path(os.environ["CALLS"]).read_text().splitlines()]
    values = [stdin for words, stdin in calls if words[0] == "helm" and '"mode"' in stdin]
    return str(json.loads(values[-1])["mode"])


def main() -> int:
    name, words = Path(sys.argv[0]).name, sys.argv[1:]
    stdin = sys.stdin.read() if "--values=-" in words else ""
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{json.dumps([[name, *words], stdin])}\n")
    command = " ".join([name, *words])
    if command.startswith(os.environ.get("TERMINATES", "nothing")):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    print(answer(name, words))
    return int(command.startswith(os.environ.get("FAILS", "nothing")))


if __name__ == "__main__":
    sys.exit(main())
