"""What commands report about a node beside the agent: the cluster's state as the agent sees it, and what
follows from it.

Nothing here changes the node. `cli` may import this package. It imports `agent` and the layers below it.

Read first: `cluster.py`.
"""
