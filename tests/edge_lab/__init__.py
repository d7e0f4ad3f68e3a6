"""Edges with real BGP sessions on this machine: `make edge-lab`. It needs root and FRR.

- `__main__.py`: the command and its table.
- `testbed.py`: client, router, two edges and two nodes, each with its daemons and agents.
- `frr.py`: the daemons of FRR in a network namespace, with deploy/edge/frr.conf.
- `load.py`: many open connections, and new connections all the time.
- `echo.py`: a server for many connections.
"""
