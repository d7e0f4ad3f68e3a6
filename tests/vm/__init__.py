"""The kernel's tests on other kernels: each boots in a VM over this machine's own root file system."""
