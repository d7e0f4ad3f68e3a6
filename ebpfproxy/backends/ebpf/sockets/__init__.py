"""Sockets that the connect hooks have rewritten."""
