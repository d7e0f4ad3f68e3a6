"""nf_tables through netlink: transactions, messages, and rules as values.

- nft.py: sends transactions and reads tables; messages.py and replies.py: the message formats
- rule.py: rules, which are text in the syntax of nft(8); rule_expressions.py: what the kernel runs for them
- flowtables.py: flowtables, as messages and in replies
- sets.py, types.py: sets and data types as values
- expressions.py, encoding.py: expressions and verdicts as netlink attributes
- notifications.py: notifications, and whether another program changes a table
- tool.py: versions of the kernel and of nft(8)

It may import linux, model, log and errors. config and the layers above it may import it. See
[tool.importlinter] in pyproject.toml. Read nft.py first, then messages.py.
"""
