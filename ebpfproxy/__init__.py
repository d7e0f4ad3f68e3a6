"""ebpfproxy: an eBPF-based replacement for kube-proxy."""

__version__ = "0.2.0"
