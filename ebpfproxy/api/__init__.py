"""Sources of the cluster's state: the API server, or a folder of manifests.

A source parses objects into events and puts them into the queue of the control thread. The tracker folds
events into snapshots. Only `parse`, `parts` and `fields` know the API's field names. Only
`client_modules` imports the Kubernetes client.

`agent` and the layers above it may import this package: `lab`, `bench` and `cli`. This package imports
`config`, `plan`, `linux`, `model`, `log` and `errors`; it needs only the last three.

Read first: `event.py`, then `tracker.py`.
"""
