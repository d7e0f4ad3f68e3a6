"""The program of a relay process. It accepts connections and relays them, as the agent requests.

- `__main__`: its start, and the requests of the agent. `held`: the entries that it holds.
- `balancer`: which endpoint a client gets.
- `listening`: the sockets of frontends, and which clients they admit. `tcp`: connections. `udp`: datagrams.
- `workload`: what all of these share.

All relays listen at the same addresses (SO_REUSEPORT), and the kernel distributes clients among them.

Read first: `held.py`, then `tcp.py`.
"""
