"""What this node does with one connection, step by step, and why.

The plan gives the reasons, the kernel gives the facts, and differences between the two are reported.

- `reasons.py`: every reason, with a one-line meaning.
- `result.py`: the result types.
- `situation.py`: the plans of all Services, as the agent makes them.
- `origin.py`: who connects. `destination.py`: to which address, port and protocol, or Service.
- `lookup.py`: the frontend that the connection reaches, or why none, and the nearest ones.
- `decision.py`: every endpoint, used or excluded, and what happens to the connection.
- `mode_rules.py`: where a mode differs from the common rules.
- `path.py`: the hook, classifier or chain that sees the connection first.
- `addresses.py`: masquerading, and the addresses that client and server see.
- `connection.py`: `explain`, which combines these steps.
- `facts.py`: the same connection in the kernel's maps or rules, and where they disagree with the plan.

All modules but `facts.py` and the functions that read this machine in `origin.py` and `host.py` are pure.

Read first: `result.py`, then `connection.py`.
"""
