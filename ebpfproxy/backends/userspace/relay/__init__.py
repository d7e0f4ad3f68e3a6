"""The program of a relay process. It accepts connections and relays them, as the agent requests.

- `__main__`, `process`: start it. `control`: the requests of the agent. `held`: the entries that it holds.
- `balancer`, `affinity`: which endpoint a client gets.
- `admission`: which clients a frontend admits, as a filter of the socket.
- `tcp`: listening sockets. `dialing`: connecting to an endpoint. `connection`, `pipes`: relaying
  bytes.
- `udp`: datagrams. `counts`: what metrics show.

All relays listen at the same addresses (SO_REUSEPORT), and the kernel distributes clients among them.

Read first: `held.py`, then `tcp.py`.
"""
