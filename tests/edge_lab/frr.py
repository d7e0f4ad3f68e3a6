"""FRR in a network namespace of a lab: zebra, bgpd and bfdd, with a configuration that vtysh loads."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from ebpfproxy.lab import Pod
from ebpfproxy.lab.addresses import Addresses, Pair

DAEMONS = Path("/usr/lib/frr")
EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "edge" / "frr.conf"
PATIENCE = 300.0

# Without nexthop groups: in FRR 8.4 a group lacks a member for ever whose link was down.
_ROUTER = """
frr defaults datacenter
hostname router
no zebra nexthop kernel enable
route-map ALL permit 10
route-map NONE deny 10
router bgp 65000
 bgp router-id {router_id}
 no bgp default ipv4-unicast
 bgp bestpath as-path multipath-relax
 {neighbors}
 address-family ipv4 unicast
  maximum-paths 8
  {v4}
 exit-address-family
 address-family ipv6 unicast
  maximum-paths 8
  {v6}
 exit-address-family
exit
bfd
 profile fast
  detect-multiplier 3
  transmit-interval 100
  receive-interval 100
 exit
exit
"""


class Frr:
    """The daemons of one network namespace. They end with the lab."""

    def __init__(self, host: Pod, folder: Path, configuration: str) -> None:
        self._host = host
        self._folder = folder
        folder.mkdir()
        shutil.chown(folder, "frr", "frr")
        for daemon in ("zebra", "bgpd", "bfdd"):
            self._start(daemon)
        path = folder / "frr.conf"
        path.write_text(configuration)
        self._vtysh("-f", str(path))

    def show(self, command: str) -> Any:
        """Return the result of a command `show ... json`."""
        return json.loads(self._vtysh("-c", f"{command} json"))

    def await_sessions(self, count: int) -> None:
        """Wait until so many sessions of IPv4 are established. Raises TimeoutError."""
        await_true(lambda: self._established() == count, f"{count} BGP sessions are established")

    def _established(self) -> int:
        peers = self.show("show bgp ipv4 unicast summary").get("peers", {})
        return sum(each["state"] == "Established" for each in peers.values())

    def _start(self, daemon: str) -> None:
        folder = self._folder
        arguments: list[str | Path] = [DAEMONS / daemon, "--vty_socket", folder]
        arguments += ["-i", folder / f"{daemon}.pid", "-z", folder / "zserv.api", "-P", "0"]
        arguments += ["--log", f"file:{folder / daemon}.log", "-f", "/dev/null"]
        if daemon == "bfdd":
            arguments += ["--bfdctl", folder / "bfdd.sock"]
        self._host.popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        await_true((folder / f"{daemon}.vty").exists, f"{daemon} runs")

    def _vtysh(self, *arguments: str) -> str:
        command = ["vtysh", "--vty_socket", str(self._folder), *arguments]
        return str(self._host.run(command).stdout)


def slowed(configuration: str) -> str:
    """Return the configuration with timers for an emulated machine, which misses those of the example."""
    return configuration.replace("interval 100", "interval 3000").replace("timers 1 3", "timers 20 60")


def await_true(condition: Any, what: str) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE:g} s: {what}")
        time.sleep(0.05)


def of_edge(addresses: Addresses, index: int) -> str:
    """Return deploy/edge/frr.conf with the addresses of an edge of the lab."""
    link, vips = addresses.edge_link(index), addresses.vips
    replaced = {
        "192.0.2.11": link.edge.v4,
        "192.0.2.1": link.router.v4,
        "2001:db8::1": link.router.v6,
        "203.0.113.0/24": vips.v4,
        "2001:db8:113::/64": vips.v6,
        "hostname edge-1": f"hostname edge-{index + 1}",
    }
    pattern = "|".join(re.escape(each) + r"(?![\w.:])" for each in replaced)
    return re.sub(pattern, lambda found: replaced[found[0]], EXAMPLE.read_text())


def of_router(addresses: Addresses, edges: int) -> str:
    """Return the configuration of the router, with a session of each family to each edge."""
    peers = [addresses.edge_link(index).edge for index in range(edges)]
    every = [address for pair in peers for address in pair]
    neighbors = [
        line
        for each in every
        for line in (
            f"neighbor {each} remote-as 65001",
            f"neighbor {each} bfd profile fast",
            f"neighbor {each} timers 1 3",
        )
    ]
    return _ROUTER.format(
        router_id=addresses.router.v4,
        neighbors="\n ".join(neighbors),
        **{family: "\n  ".join(_policies(peers, family)) for family in Pair._fields},
    )


def _policies(peers: list[Pair], family: str) -> list[str]:
    of_family = [getattr(each, family) for each in peers]
    return [
        f"neighbor {each} {what}"
        for each in of_family
        for what in ("activate", "route-map ALL in", "route-map NONE out")
    ]
