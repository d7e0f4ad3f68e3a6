"""Netlink: the protocol, rtnetlink and conntrack.

- netlink.py: requests, dumps and batches of changes on raw netlink sockets
- rtnetlink.py, rtnetlink_watch.py: links, addresses and routes, decoded once; notifications
- iproute.py: changes of links, single addresses and tc filters through pyroute2
- links.py, local_addresses.py, pod_devices.py, routing.py: read devices, addresses and routes
- dummy.py, owned_devices.py, reinjection.py, geneve.py: create devices; the first also changes addresses
- local_routes.py, on_link_routes.py: add routes of single addresses
- conntrack.py: reads, adds and deletes conntrack entries
- nfacct.py: creates, reads and deletes packet counters

It may import linux, model, log and errors. config and the layers above it may import it. See
[tool.importlinter] in pyproject.toml. Read netlink.py first, then rtnetlink.py.
"""
