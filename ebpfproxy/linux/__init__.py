"""One module per kernel interface: thin, without policy. bcc, pyroute2 and subprocess are used only here.

Each function does one system call or one netlink exchange, and turns its errno into our errors.
"""
