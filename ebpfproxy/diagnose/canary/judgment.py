"""Whether a connection proves that a path works."""

from ebpfproxy.diagnose.canary.clients import Client
from ebpfproxy.diagnose.canary.result import Locate, Outcome, Result, State
from ebpfproxy.diagnose.explain.result import Destination, Explanation, Via
from ebpfproxy.errors import KernelError
from ebpfproxy.model.address import Address, Protocol, family, format_address, format_endpoint

_MOST_DIRECT = 5
"""Endpoints to which a client connects without the Service."""


def tried(client: Client, explanation: Explanation, locate: Locate) -> Result:
    """Connect once, and compare what happened with the explanation, which says that it connects."""
    destination, path = explanation.destination, explanation.path
    assert destination
    assert path
    to = Result(name(client, destination), destination, explanation.service, path.place, State.UNPROVEN)
    if destination.protocol is Protocol.SCTP:
        return to._replace(detail="no connection was made: SCTP is not supported")
    try:
        outcome = client.attempt(destination, locate)
        return _judged(client, explanation, outcome, to)
    except KernelError as failure:
        return to._replace(detail=f"no connection was made: {failure.message}")


def name(client: Client, destination: Destination) -> str:
    """The client and its address, for readers."""
    address = client.origin.address(family(destination.address))
    return " ".join(filter(None, (client.origin.name, format_address(address) if address else "")))


def _judged(client: Client, explanation: Explanation, outcome: Outcome, to: Result) -> Result:
    destination, path = explanation.destination, explanation.path
    assert destination
    assert path
    usable = {(each.address, each.port) for each in explanation.endpoints if each.used}
    found = outcome.translation
    if found is None:
        detail = "the kernel does not translate the connection"
        if not outcome.error:
            return to._replace(state=State.FAILS, detail=f"{detail}, and something else answers")
        return _compared(client, sorted(usable), to, f"{outcome.error}; {detail}")
    to = to._replace(endpoint=format_endpoint(*found.endpoint))
    if found.endpoint not in usable:
        return to._replace(state=State.FAILS, detail="the plan does not use this endpoint")
    if found.by_socket is not (path.via is Via.SOCKET):
        by = "a socket hook" if found.by_socket else "the packet path"
        return to._replace(state=State.FAILS, detail=f"it was translated by {by} instead")
    if outcome.error:
        return _compared(client, [found.endpoint], to, outcome.error)
    if outcome.peer != (destination.address, destination.port):
        peer = format_endpoint(*outcome.peer) if outcome.peer else "nothing"
        return to._replace(state=State.FAILS, detail=f"the client has {peer} as its peer")
    return to._replace(state=State.WORKS)


def _compared(client: Client, endpoints: list[tuple[Address, int]], to: Result, error: str) -> Result:
    """Connect to the endpoints themselves. If one answers, the path is at fault."""
    protocol = to.destination.protocol
    if protocol is Protocol.TCP:
        for address, port in endpoints[:_MOST_DIRECT]:
            if not client.attempt(Destination(address, port, protocol), lambda connection: None).error:
                endpoint = format_endpoint(address, port)
                detail = f"{error}; {endpoint} answers without the Service"
                return to._replace(state=State.FAILS, detail=detail)
    elif not to.endpoint:
        return to._replace(state=State.FAILS, detail=error)
    return to._replace(detail=f"{error}; the endpoint does not answer without the Service either")
