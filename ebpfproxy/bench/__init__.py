"""Benchmarks: the cost of a mode for connections and packets, and of the agent for a node, measured in a lab.

Network namespaces and veth pairs replace nodes and wires, so that only ratios are valid on other machines.
The benchmarks are `churn`, `compare`, `connect`, `nodeport`, `packet` and `sync`. The load generator is the C
program in `c/`. `packet.c` contains BPF programs for `prog_test_run`. The benchmark `compare` also has
`compare_cases`, `proxies`, `kube_proxy`, `results` and `html_report`.

Only `cli` may import this package, besides tests. It imports `lab`, `agent`, `backends`, `linux`, `model` and
`errors`.

Read first: `connect.py`, the simplest benchmark, then `sides.py`.
"""
