"""``ebpfproxy explain``: what this node does with a connection, step by step, and why."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ebpfproxy.cli.dump_source import from_dump_option
from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.terminal import console
from ebpfproxy.config import Config, FlagsCommand, config_options
from ebpfproxy.config.command import BooleanOption

if TYPE_CHECKING:
    from ebpfproxy.diagnose.explain.result import EndpointResult, Explanation
    from ebpfproxy.diagnose.explain.session import Answer, Session

_DOES_NOT_WORK = 1
_UNLIMITED_WIDTH = 10_000  # columns if the output is not a terminal, so that a step stays one line


def _show_reasons(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    """Print every reason by subject, one on each line, and exit."""
    if not wanted or context.resilient_parsing:
        return
    from ebpfproxy.diagnose.explain.reasons import BY_SUBJECT

    for subject, reasons in BY_SUBJECT.items():
        click.echo(f"{subject}:")
        for each in reasons:
            click.echo(f"  {each.word:<24} {each.meaning}")
    context.exit()


@click.command(
    "explain",
    cls=FlagsCommand,
    epilog=examples("""
    # Explain each port of an address, for any pod of this node.
    ebpfproxy explain 10.96.0.10
    # Explain one port of a Service for a pod.
    ebpfproxy explain prod/web:https --from=10.244.1.7
    # Explain a NodePort for clients outside.
    ebpfproxy explain 192.0.2.10:30080 --from=outside
    # Check manifests in CI: exit code 1 if a port does not work.
    ebpfproxy explain prod/web --manifests=rendered/ --assume-node=worker-1
    # Explain a saved dump on another machine.
    ebpfproxy explain 10.96.0.10:443 --from-dump=node1.json -o json
    """),
)
@click.argument("destination", metavar="DESTINATION[:PORT][/PROTOCOL]")
@click.option(
    "--from",
    "client",
    metavar="CLIENT",
    default="",
    help="Who connects: the address of a pod, of this node or of another client, which may have a port, a "
    "process id, a network namespace, or node, pod or outside. Default: any pod of this node.",
)
@click.option(
    "--assume-node",
    metavar="NAME",
    default="",
    help="Explain what the node of this name does. The kernel is not read then.",
)
@click.option(
    "--assume-zone",
    metavar="ZONE",
    help="Explain as if this node were in this zone. The kernel's tables are not compared then.",
)
@click.option(
    "--kernel",
    metavar="[BOOL]",
    cls=BooleanOption,
    help="Read this machine's kernel: its addresses, devices and routes, and compare the plan with the "
    "tables of Services. Default: true, but false with --manifests.",
)
@from_dump_option
@click.option(
    "--reasons",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_reasons,
    help="Show every reason that a step can have, with its meaning, and exit.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["tree", "json"]),
    default="tree",
    show_default=True,
    help="Output format.",
)
@config_options
def command(
    destination: str,
    client: str,
    assume_node: str,
    assume_zone: str | None,
    kernel: str | None,
    from_dump: Path | None,
    output: str,
    config: Config,
) -> int:
    """Explain what this node does with a connection, step by step, and why.

    DESTINATION is an address, or a Service: web, prod/web:https, web.prod.svc. Without a port, every port
    is explained. PROTOCOL is tcp, udp, sctp or icmp.

    Run it with the agent's flags, as root, in the agent's namespaces or pod. With --manifests it needs
    neither root nor an agent. Changes nothing.

    The exit code is 0 if the client gets an answer of an endpoint at each port, and 1 if not, or if the
    kernel differs from the plan.
    """
    from ebpfproxy.backends.ebpf.inspect.saved import SavedView
    from ebpfproxy.diagnose.explain.session import Session, Sources

    is_kernel = config.manifests is None if kernel is None else kernel == "true"
    dump = SavedView(from_dump) if from_dump else None
    sources = Sources(assume_node or None, assume_zone, is_kernel, dump)
    with Session(config, sources) as session:
        answer = session.answer(destination, client)
        if output == "json":
            _show_json(answer, session)
        else:
            _show_trees(answer, session)
    return 0 if answer.works else _DOES_NOT_WORK


def _show_json(answer: "Answer", session: "Session") -> None:
    from ebpfproxy.model.address import format_address

    content = {
        "node": session.situation.context.node_name,
        "mode": session.situation.mode,
        "client": {
            "kind": answer.origin.kind.value,
            "name": answer.origin.name,
            "addresses": list(map(format_address, answer.origin.addresses)),
        },
        "works": answer.works,
        "explanations": [_as_json(each) for each in answer.explanations],
    }
    click.echo(json.dumps(content, indent=2))


def _as_json(explanation: "Explanation") -> dict[str, Any]:
    return {
        "destination": str(explanation.destination) if explanation.destination else None,
        "service": explanation.service,
        "verdict": explanation.verdict.value,
        "reason": explanation.why.word,
        "works": explanation.works,
        "steps": [
            {
                "subject": step.reason.subject,
                "reason": step.reason.word,
                "text": step.text,
                "details": list(step.details),
            }
            for step in explanation.steps
        ],
        "endpoints": list(map(_endpoint_json, explanation.endpoints)),
        "disagreements": list(explanation.disagreements),
    }


def _endpoint_json(endpoint: "EndpointResult") -> dict[str, Any]:
    from ebpfproxy.model.address import format_address

    return {
        "address": format_address(endpoint.address),
        "port": endpoint.port,
        "used": endpoint.used,
        "works": endpoint.works,
        "reason": endpoint.reason.word,
        "node": endpoint.node,
        "zones": list(endpoint.zones),
        "masqueraded": endpoint.masqueraded,
        "masquerade_reason": endpoint.why_masquerade.word if endpoint.why_masquerade else None,
        "seen": list(map(format_address, endpoint.seen)),
    }


def _show_trees(answer: "Answer", session: "Session") -> None:
    """Print a tree for each destination. Long steps wrap on a terminal, so that nothing is cut off."""
    shown = console(piped_width=_UNLIMITED_WIDTH)
    for explanation in answer.explanations:
        with shown.capture() as output:
            shown.print(_tree(explanation, session))
        for line in output.get().splitlines():
            click.echo(line.rstrip(), color=True)


def _tree(explanation: "Explanation", session: "Session") -> Any:
    from rich.text import Text
    from rich.tree import Tree

    situation = session.situation
    subject = str(explanation.destination or explanation.service)
    mark = "works" if explanation.works else "does not work"
    title = f"{subject} on {situation.context.node_name}, mode {situation.mode}: {mark}"
    tree = Tree(Text(title, style="bold green" if explanation.works else "bold red"))
    for step in explanation.steps:
        branch = tree.add(
            Text.assemble((f"{step.reason.subject}: ", "bold"), step.text, f" [{step.reason.word}]")
        )
        for detail in step.details:
            branch.add(Text(detail))
    return tree
