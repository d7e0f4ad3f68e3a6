"""Kubernetes' own sig-network tests on real clusters: `make test-cluster`.

kind creates a cluster without kube-proxy, or KUBECONFIG names an existing one. Read `__main__` first.

- `programs`: runs kind, kubectl, helm and the container engine.
- `versions`: the node images and network plugins, pinned in versions.toml.
- `created`, `existing`: the two kinds of clusters, as a `Target`.
- `proxy`: the Helm chart, and the mode of each node.
- `skips`, `e2e`: which tests run, and their outcome.
- `table`: the outcomes of several runs as Markdown.
"""
