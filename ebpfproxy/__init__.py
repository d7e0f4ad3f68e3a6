"""ebpfproxy: an eBPF-based replacement for kube-proxy."""

__version__ = "0.1.0"
