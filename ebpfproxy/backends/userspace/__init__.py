"""Mode userspace: processes of the agent accept connections and relay them. For machines where no other mode
works.

- `entries`, `rendering`: what the mode holds, by key; plans as entries.
- `addresses`: the addresses of Services, as local routes; the removal of what the mode left.
- `relays`: the relay processes, which the agent starts, controls and replaces.
- `relay/`: the program of such a process. It does not use the rest of this package, except for `messages` and
  `entries`.
- `messages`: what agent and relays send each other.
- `settings`: the settings of relays, as options have them.
- `backend`, `mode`, `inspection`: as in the other modes.

Mode `nftables` uses relays, too, for NodePorts on loopback.

Read first: `entries.py`, then `relay/__init__.py`.
"""
