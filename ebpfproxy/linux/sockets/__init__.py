"""Sockets of this node: sock_diag, duplicates of descriptors."""
