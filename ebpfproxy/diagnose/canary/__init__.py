"""Canary connections: whether a new connection really goes through each path of this node.

- `canary.py`: runs them. `result.py`: the results.
- `choice.py`: the frontends for each path. `judgment.py`: whether a connection proves that its path works.
- `clients.py`: who connects: sockets of the node and of its pods, and a client outside at an uplink.
- `segment.py`: the packets of that client.

Canary connections use real Services and change no object, neither in the API server nor in the kernel's
tables of Services (docs/decisions/0031).

Read first: `canary.py`.
"""
