"""The program of a relay process. It accepts connections and relays them, as the agent requests.

- `__main__`, `process`: start it. `control`: the requests of the agent. `held`: the entries that it holds.
- `balancer`, `selection`, `affinity`: which endpoint a client gets. `target`: an endpoint for sockets.
- `admission`: which clients a frontend admits, as a filter of the socket.
- `listening`: options of the sockets of frontends. `tcp`: listening sockets. `dialing`: connecting to an
  endpoint. `connection`: relaying bytes.
- `udp`, `flows`: datagrams. `workload`: what all of these share. `counts`: what metrics show.

All relays listen at the same addresses (SO_REUSEPORT), and the kernel distributes clients among them.

Read first: `held.py`, then `tcp.py`.
"""
