"""nf_tables through netlink: transactions, messages, and conversion between rules and their text.

- nft.py: sends transactions and reads tables; messages.py and replies.py: the message formats
- expressions.py, rule.py, sets.py, types.py: rules, sets and data types as values
- encoding.py: expressions as netlink attributes; compile.py and decompile.py: as text of nft(8)
- notifications.py: notifications, and whether another program changes a table
- tool.py: versions of the kernel and of nft(8)

It may import linux, model, log and errors. config and the layers above it may import it. See
[tool.importlinter] in pyproject.toml. Read nft.py first, then messages.py.
"""
