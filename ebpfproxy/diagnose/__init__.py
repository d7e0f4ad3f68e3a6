"""What commands report about a node beside the agent: the cluster's state as the agent sees it, and what
follows from it.

- `cluster`: the state of the cluster.
- `doctor`: what the node lacks, and which other programs it has.

Only `doctor/remedies.py` changes the node. `cli` may import this package. It imports `agent` and the layers
below it.

Read first: `cluster.py`, then `doctor/__init__.py`.
"""
