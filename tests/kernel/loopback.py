"""Addresses of the loopback device, for tests that use them at once."""

import subprocess

from ebpfproxy.linux.netlink import local_addresses
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Network, parse_address
from tests.kernel.cluster import eventually


def add_addresses(*addresses: str) -> None:
    """In the calling thread's network namespace: set loopback up, add the addresses, and wait for their
    routes. The kernel adds the route of an IPv6 address in a work queue (addrconf_dad_work()), and until then
    the address is unreachable."""
    netns.set_loopback_up()
    lines = (f"addr add {each}/{128 if ':' in each else 32} dev lo" for each in addresses)
    text = "\n".join(f"{line} nodad" if ":" in line else line for line in lines)
    subprocess.run(["ip", "-batch", "-"], input=text, text=True, check=True)
    own = {Network(parse_address(each), 128) for each in addresses}
    eventually(lambda: own <= local_addresses.read(), "the routes of the addresses")
