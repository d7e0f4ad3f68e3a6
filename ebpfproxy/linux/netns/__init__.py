"""Network namespaces: creating named ones, entering them, and finding those of all processes.

It may import linux, model, log and errors. config and the layers above it may import it. See
[tool.importlinter] in pyproject.toml. Read netns.py first, then namespaces.py.
"""
