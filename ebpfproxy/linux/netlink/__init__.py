"""Netlink: the protocol, rtnetlink and conntrack.

- netlink.py: requests, dumps and batches of changes on raw netlink sockets
- rtnetlink.py, rtnetlink_watch.py, iproute.py: message formats, notifications, changes through pyroute2
- links.py, local_addresses.py, pod_devices.py, routing.py: read devices, addresses and routes
- dummy.py, reinjection.py, geneve.py: create devices; the former also changes addresses
- local_routes.py: adds addresses that no device has
- conntrack.py: reads, adds and deletes conntrack entries
- nfacct.py: creates, reads and deletes packet counters

It may import linux, model, log and errors. config and the layers above it may import it. See
[tool.importlinter] in pyproject.toml. Read netlink.py first, then rtnetlink.py.
"""
