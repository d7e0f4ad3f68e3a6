"""Changes of the tables of mode nftables, by nft(8), except for elements whose keys nft cannot write."""

import re
import subprocess
import sys
from collections.abc import Callable

from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import (
    TABLE,
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Endpoints,
    Entry,
    Key,
    endpoint_bytes,
    nft_family,
)
from ebpfproxy.linux.nft import messages
from ebpfproxy.linux.nft.messages import Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.sets import SetElement
from tests.kernel.verify.node import Node


def _entries() -> dict[Key, Entry]:
    backend = NftablesBackend()
    backend.open()
    try:
        return backend.read()
    finally:
        backend.close()


def _nft(*lines: str) -> str:
    command = ["nft", "-a", "-f", "-"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def _element(
    node: Node, wanted: Callable[[Element, ElementEntry], object] = lambda key, entry: True
) -> tuple[Element, ElementEntry]:
    """A wanted element."""
    found = [(k, e) for k, e in _entries().items() if isinstance(k, Element) and isinstance(e, ElementEntry)]
    usable = [each for each in found if wanted(*each)]
    return node.random.choice(sorted(usable, key=lambda each: str(each[0])))


def _chain(node: Node, hooked: bool | None = None) -> tuple[Chain, ChainEntry]:
    """A chain with rules. `hooked`: whether it is a base chain, None for any."""
    found = [(k, e) for k, e in _entries().items() if isinstance(k, Chain) and isinstance(e, ChainEntry)]
    usable = [each for each in found if each[1].rules and hooked in (None, bool(each[1].hook))]
    return node.random.choice(sorted(usable, key=lambda each: str(each[0])))


def _place(of: Chain | Element) -> str:
    return f"{nft_family(of.family)} {TABLE}"


def delete_element(node: Node) -> str:
    key, _ = _element(node)
    _nft(f"delete element {_place(key)} {key.container} {{ {key.key} }}")
    return str(key)


def change_element(node: Node) -> str:
    """Change the verdict of an element of a map."""
    key, _ = _element(node, lambda key, entry: entry.verdict)
    _nft(
        f"delete element {_place(key)} {key.container} {{ {key.key} }}",
        f"add element {_place(key)} {key.container} {{ {key.key} : accept }}",
    )
    return str(key)


def add_element(node: Node) -> str:
    key, _ = _element(node, lambda key, entry: entry.verdict and key.container == "service-ips")
    address = "192.0.2.9" if "." in key.key.split(" ")[0] else "2001:db8::9"
    text = f"{address} . tcp . {node.random.randrange(1, 65536)}"
    _nft(f"add element {_place(key)} service-ips {{ {text} : accept }}")
    return text


def flush_chain(node: Node) -> str:
    key, _ = _chain(node)
    _nft(f"flush chain {_place(key)} {key.name}")
    return str(key)


def insert_rule(node: Node) -> str:
    key, _ = _chain(node)
    _nft(f"{node.random.choice(['insert', 'add'])} rule {_place(key)} {key.name} meta mark 0x77 drop")
    return str(key)


def delete_rule(node: Node) -> str:
    key, _ = _chain(node)
    listed = _nft(f"list chain {_place(key)} {key.name}")
    handles = re.findall(r"^\t\t.* # handle (\d+)$", listed, re.MULTILINE)
    _nft(f"delete rule {_place(key)} {key.name} handle {node.random.choice(handles)}")
    return str(key)


def replace_rule(node: Node) -> str:
    key, _ = _chain(node)
    listed = _nft(f"list chain {_place(key)} {key.name}")
    handles = re.findall(r"^\t\t.* # handle (\d+)$", listed, re.MULTILINE)
    _nft(f"replace rule {_place(key)} {key.name} handle {node.random.choice(handles)} meta mark 0x78 drop")
    return str(key)


def change_policy(node: Node) -> str:
    key, _ = _chain(node, hooked=True)
    _nft(f"chain {_place(key)} {key.name} {{ policy drop ; }}")
    return str(key)


def add_chain(node: Node) -> str:
    key, _ = _chain(node)
    name = f"service-{node.random.randrange(10**6)}-default/foreign/tcp/http"
    _nft(f"add chain {_place(key)} {name}")
    return name


def add_set(node: Node) -> str:
    key, _ = _chain(node)
    name = f"foreign-{node.random.randrange(10**6)}"
    _nft(f"add set {_place(key)} {name} {{ type inet_service; }}")
    return name


def change_endpoints(node: Node) -> str:
    """Delete one endpoint of a list, or add one."""
    found = [key for key in _entries() if isinstance(key, Endpoints)]
    key = node.random.choice(sorted(found, key=str))
    table, size = Table(nft_family(key.family), TABLE), endpoint_bytes(key.family) - 4
    with Session() as session:
        listed = sorted(
            each for each in session.listed(table, key.container, size) if each[0] == key.identity
        )
        place = _place_key(key, node.random.choice(listed)[1])
        change = messages.delete_elements(table, key.container, [SetElement(place)])
        assert not session.commit([change])
    return str(key)


def _place_key(key: Endpoints, place: int) -> bytes:
    return key.identity + place.to_bytes(4, sys.byteorder)


def delete_table(node: Node) -> str:
    key, _ = _chain(node)
    _nft(f"delete table {_place(key)}")
    return f"{nft_family(key.family)} chain"


STAY: tuple[Callable[[Node], str], ...] = (
    *(delete_element, change_element, add_element, flush_chain, insert_rule, delete_rule, replace_rule),
    *(change_policy, add_chain, add_set, change_endpoints, delete_table),
)
PASSING = ()
