"""Differences that are made in the kernel, which `ebpfproxy verify` must find."""
