"""What this node does with one connection, step by step, and why.

The plan gives the reasons, the kernel gives the facts, and differences between the two are reported.

- `reasons.py`: every reason, with a one-line meaning.
- `result.py`: the result types.
- `origin.py`: who connects. `destination.py`: to which address, port and protocol, or Service.
- `lookup.py`: the frontend that the connection reaches, or why none, and the nearest ones.
- `decision.py`: every endpoint, used or excluded, and what happens to the connection.
- `mode_rules.py`: where a mode differs from the common rules.
- `path.py`: the hook, classifier or chain that sees the connection first.
- `addresses.py`: masquerading, and the addresses that client and server see.
- `connection.py`: `explain`, which combines these steps.
- `echo.py`: the same for an echo request (ping).
- `facts.py`: what an explanation says about the kernel: affinity, rules of others, differences.
- `from_tables.py`: the plans as a saved dump shows them.
- `kernel_facts.py`: the entries of any mode in the kernel or a saved dump that differ from the plan.
- `host.py`: what this machine knows of routes and clients.
- `session.py`: reads the sources, and explains requests.

Only `host.py`, `kernel_facts.py` and `session.py` read anything; the other modules are pure.

Read first: `result.py`, then `connection.py`.
"""
