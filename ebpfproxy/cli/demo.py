"""``ebpfproxy demo``: runs pods, a Service and the agent on this machine, in less than a minute."""

import collections
import functools
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import click
import yaml
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from ebpfproxy.bench.load import Load
from ebpfproxy.cli import terminal
from ebpfproxy.cli.epilog import examples
from ebpfproxy.lab import Lab, Pod, manifests, sockets
from ebpfproxy.linux.child import python
from ebpfproxy.model.address import Protocol

SERVICE_IPS = ("10.96.0.10", "fd00:10:96::10")
NO_ENDPOINT_IP = "10.96.0.20"
ECHO_IP = "10.96.0.30"
PORT = 80
POD_PORT = 8080
ECHO_PORT = 9090
NODE_PORT = 30080
REQUESTS = 300
SAMPLES = 4000
FLOWS = 5

console = terminal.console(markup=True)


@click.command(
    "demo",
    epilog=examples("""
    ebpfproxy demo
    """),
)
def command() -> None:
    """Run pods, a Service and the agent in network namespaces of this machine, and show each step.

    Needs root and a C compiler, and takes less than a minute. Uses only its own devices and cgroups, and
    removes them.
    """
    start = time.monotonic()
    with Lab("demo") as lab:
        _Demo(lab).run()
    console.print(f"\n[dim]Removed everything. The demo took {time.monotonic() - start:.0f} s.[/]")


class _Demo:
    """The steps, in order. Each prints what it does and the result."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.folder = lab.folder / "manifests"
        self.load = Load(lab.folder)

    def run(self) -> None:
        self.pods()
        self.objects()
        self.agent()
        self.requests()
        self.changes()
        self.node_port()
        self.outside()
        self.rejection()
        self.dump()
        self.latency()

    def pods(self) -> None:
        _heading("A node and four pods", "each with a network namespace, a veth pair and a cgroup")
        self.webs = [self.lab.pod(f"web-{number}") for number in (1, 2, 3)]
        self.client = self.lab.pod("client")
        for web in self.webs:
            web.serve_http(POD_PORT)
            self.load.serve(web, ECHO_PORT)
            console.print(f"  [bold]{web.name:8}[/] {web.v4:12} {web.v6:20} http server on port {POD_PORT}")
        console.print(f"  [bold]{'client':8}[/] {self.client.v4:12} {self.client.v6}")
        console.print(f"  [bold]{'host':8}[/] {self.lab.node.v4:12} {self.lab.node.v6}")

    def objects(self) -> None:
        _heading("A Service and its endpoints", "as kubectl get -o yaml shows them")
        self.folder.mkdir()
        port = manifests.port(PORT, target=POD_PORT, node_port=NODE_PORT)
        web = manifests.service("web", SERVICE_IPS, [port])
        empty = manifests.service("empty", [NO_ENDPOINT_IP], [manifests.port(PORT)])
        manifests.write(self.folder / "web.yaml", web)
        manifests.write(self.folder / "empty.yaml", empty)
        echo = manifests.service("echo", [ECHO_IP], [manifests.port(PORT, target=ECHO_PORT)])
        addresses = [web.v4 for web in self.webs]
        echoes = manifests.endpoint_slice("echo-4", "echo", addresses, [manifests.port(ECHO_PORT)])
        manifests.write(self.folder / "echo.yaml", echo, echoes)
        self._write_slices(self.webs[:2])
        columns = Table.grid(padding=(0, 4))
        columns.add_row(_yaml(web), _yaml(self._slice(self.webs[:2], six=False)))
        console.print(columns)

    def agent(self) -> None:
        _heading("The agent", "loads its programs, reads the manifests, fills the maps")
        _command(f"ebpfproxy run --manifests {self.folder} --cgroup-root {self.lab.cgroup}")
        with terminal.progress("starting the agent: up to 5 s"):
            agent = self.lab.agent(self.folder)
            line = agent.await_sync()
        console.print(f"  ready after {line.moment - agent.started:.2f} s:")
        console.print(f"  [dim]{escape(line.text)}[/]", soft_wrap=True)

    def requests(self) -> None:
        _heading("Which pod answers?", f"{REQUESTS} requests to each address of the Service")
        for client in (self.client, self.lab.node):
            for address in SERVICE_IPS:
                self._show_answers(client, _url(address, PORT))

    def changes(self) -> None:
        _heading("Add a pod, remove a pod", "while the client sends requests without a pause")
        duration = self._change(self.webs, lambda answers: _first(answers, "web-3"))
        console.print(
            f"  [bold]web-3[/] added:   its first answer came [bold green]{duration:.1f} ms[/] later"
        )
        duration = self._change(self.webs[1:], lambda answers: _last(answers, "web-1"))
        console.print(
            f"  [bold]web-1[/] removed: its last answer came [bold green]{duration:.1f} ms[/] later"
        )
        self._show_answers(self.client, _url(SERVICE_IPS[0], PORT))

    def node_port(self) -> None:
        _heading("NodePort", f"port {NODE_PORT} of the node, and of its 127.0.0.1")
        self._show_answers(self.client, _url(self.lab.node.v4, NODE_PORT))
        self._show_answers(self.lab.node, _url("127.0.0.1", NODE_PORT))

    def outside(self) -> None:
        _heading("From outside", "the packets of a client on the node's network, translated by tc programs")
        self._show_answers(self.lab.outside, _url(self.lab.node.v4, NODE_PORT))
        self._show_answers(self.lab.outside, _url(SERVICE_IPS[1], PORT))
        _command(f"ebpfproxy dump conntrack | head -{FLOWS}")
        for line in self._dumped("conntrack")[1 : FLOWS + 1]:
            console.print(f"  [dim]{escape(line)}[/]", soft_wrap=True)

    def rejection(self) -> None:
        _heading("A Service without endpoints", "the connection is rejected at once")
        _prompt(self.client, f"curl {_url(NO_ENDPOINT_IP, PORT)}")
        outcome, duration = self.client.call(lambda: _attempt(NO_ENDPOINT_IP, PORT))
        console.print(f"  {escape(outcome)} after [bold green]{duration:.1f} ms[/]")

    def dump(self) -> None:
        _heading("The content of the BPF maps")
        _command("ebpfproxy dump")
        console.file.flush()
        # dump writes directly to this terminal, so that it uses the terminal's width.
        self.lab.node.popen(self._dump_command()).wait()

    def _dump_command(self, *what: str) -> list[str]:
        return python("-m", "ebpfproxy", "dump", *what, f"--bpffs-root={self.lab.bpffs}")

    def _dumped(self, what: str) -> list[str]:
        with tempfile.TemporaryFile() as out:
            self.lab.node.popen(self._dump_command(what), stdout=out).wait()
            out.seek(0)
            return out.read().decode().splitlines()

    def latency(self) -> None:
        _heading("Latency", f"the duration of connect(), {SAMPLES} times each")
        pods = [(web.v4, ECHO_PORT) for web in self.webs]
        targets = self.load.targets("both", pods, [(ECHO_IP, PORT)])
        with terminal.progress("connecting"):
            samples = self.load.measure(self.client, "connect", targets, 2 * SAMPLES)
        for name, durations in zip(("to a pod's address", "through the Service"), samples, strict=True):
            p50, p99 = (
                figure / 1000
                for figure in (statistics.median(durations), statistics.quantiles(durations, n=100)[98])
            )
            console.print(f"  {name:22} median [bold]{p50:6.1f} µs[/]   99% below {p99:6.1f} µs")

    def _show_answers(self, client: Pod, url: str) -> None:
        with terminal.progress("sending requests"):
            counts = client.call(lambda: collections.Counter(_get(url) for _ in range(REQUESTS)))
        _prompt(client, f"curl {url}")
        words = (f"{name} [bold]{count}[/]" for name, count in sorted(counts.items()))
        console.print(f"  {'   '.join(words)}")

    def _change(self, webs: list[Pod], moment: Callable[[list[tuple[float, str]]], float]) -> float:
        """Replace the slices while the client sends requests.

        Return the `moment` of the answers, which are pairs of milliseconds after the change and pod name.
        """
        url = _url(SERVICE_IPS[0], PORT)

        def child() -> float:
            _get(url)
            self._write_slices(webs)
            start = time.monotonic()
            answers: list[tuple[float, str]] = []
            while len(answers) < REQUESTS or time.monotonic() - start < 1.0:
                name = _get(url)
                answers.append(((time.monotonic() - start) * 1000, name))
            return moment(answers)

        with terminal.progress("sending requests"):
            return self.client.call(child)

    def _write_slices(self, webs: list[Pod]) -> None:
        slices = [self._slice(webs, six=six) for six in (False, True)]
        manifests.write(self.folder / "web-endpoints.yaml", *slices)

    def _slice(self, webs: list[Pod], *, six: bool) -> manifests.Object:
        endpoints: list[str | manifests.Object] = [
            manifests.endpoint(web.v6 if six else web.v4, node=self.lab.node_name) for web in webs
        ]
        name = "web-6" if six else "web-4"
        return manifests.endpoint_slice(name, "web", endpoints, [manifests.port(POD_PORT)])


def _heading(title: str, explanation: str = "") -> None:
    console.print(f"\n[bold cyan]{title}[/]" + (f"  [dim]{explanation}[/]" if explanation else ""))


def _command(text: str | Path) -> None:
    console.print(f"  [dim]node #[/] {text}", soft_wrap=True)


def _prompt(client: Pod, text: str) -> None:
    console.print(f"  [dim]{client.name} $[/] {escape(text)}", soft_wrap=True)


def _url(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}/" if port == PORT else f"http://{host}:{port}/"


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """Return an opener that ignores the proxy of the environment.

    It is cached because it reads all certificates, which takes up to 0.1 s.
    """
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _get(url: str) -> str:
    """Return the body. Raises OSError."""
    with _opener().open(url, timeout=3) as response:
        return str(response.read().decode().strip())


def _attempt(address: str, port: int) -> tuple[str, float]:
    """Connect; return the result and the duration in milliseconds."""
    start = time.monotonic()
    try:
        sockets.dial(Protocol.TCP, address, port).close()
        outcome = "connected"
    except OSError as error:
        outcome = str(error)
    return outcome, (time.monotonic() - start) * 1000


def _yaml(shown: manifests.Object) -> Syntax:
    return Syntax(yaml.safe_dump(shown, sort_keys=False), "yaml", background_color="default")


def _first(answers: list[tuple[float, str]], name: str) -> float:
    return min((moment for moment, answer in answers if answer == name), default=float("nan"))


def _last(answers: list[tuple[float, str]], name: str) -> float:
    return max((moment for moment, answer in answers if answer == name), default=0.0)
