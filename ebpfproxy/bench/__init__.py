"""What the backend costs a connection, and what the agent costs the node, measured in a lab.

Both are relative figures of one machine: network namespaces and veth pairs stand for nodes and wires.
"""
