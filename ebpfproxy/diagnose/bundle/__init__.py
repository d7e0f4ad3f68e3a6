"""The support bundle: an archive of what describes a node, without secrets.

`archive.py` collects parts and writes the file. `redact.py` removes secrets, with `credentials.py` for those
in text. `anonymize.py` replaces names and addresses. `logs.py` finds the agent's log, and `node.py` has the
parts that are no commands.

`cli/support_bundle.py` imports this package. Read first: `archive.py`.
"""
