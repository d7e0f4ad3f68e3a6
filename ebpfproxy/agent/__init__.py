"""The agent: reads events, plans, and keeps the kernel in sync.

- `process.py`: signals and HTTP servers first, then the control thread, and its end or restart.
- `front.py`, `signals.py`, `ending.py`, `restart.py`: the HTTP servers; the thread that receives signals; the
  limited time to end; the replacement of the process.
- `daemon.py`: the control thread and its loop. `inbox.py`: the items that it receives.
- `initialize.py`: `--init-only`. `api_events.py`, `service_events.py`: Events in the API server.
- `sources.py`: the threads that put events into the inbox of the control thread.
- `announcer.py`: announces direct server return with an annotation of the Node.
- `pacing.py`: when to sync, and when to check for changes by other programs.
- `reconciler.py`: plans, renders, compares, applies for one backend. `parts.py`: what it renders next.
  `rejections.py`: what it retries next.
- `active_mode.py`: one mode in use: its backend and its reconciler.
- `mode_switch.py`: selects a mode, switches to another one, and falls back if a mode fails.
- `edge.py`, `edge_view.py`, `vip_device.py`: what only an edge does: checks of nodes, announced addresses,
  the drain.
- `mode_cleanup.py`: the thread that removes what other modes left in the kernel.

Only the control thread changes state. The other threads put items into its inbox.

`lab`, `bench` and `cli` may import this package. This package may import all layers below it: `backends`,
`http`, `api`, `config`, `plan`, `linux`, `model`, `log` and `errors`.

Read first: `process.py`, `daemon.py`, then `reconciler.py`.
"""
