"""Values: what the API server and the kernel reported, in types of our own. Standard library only.

Nothing here reads a file, a socket or the kernel, decides a Kubernetes rule, or changes once made.
"""
