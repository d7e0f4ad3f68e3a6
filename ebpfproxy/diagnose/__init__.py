"""What commands report about a node beside the agent: the cluster's state as the agent sees it, and what
follows from it.

- `cluster`: the state of the cluster. `mode_in_use`: the mode that serves on the node.
- `agent_pages`: the HTTP pages of the running agent.
- `situation`: the plans of all Services, as the agent makes them.
- `verify`: compares the entries of these plans with the kernel. `changes`: the result as lines.
- `canary`: connects by each path of the node.
- `explain`: what the node does with a connection, and why.
- `doctor`: what the node lacks, and which other programs it has.
- `bundle`: the support bundle.

Only `doctor/remedies.py` changes the node. `cli` may import this package. It imports `agent` and the layers
below it.

Read first: `cluster.py`, then the `__init__.py` of a package.
"""
