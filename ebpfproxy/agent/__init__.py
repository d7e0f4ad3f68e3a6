"""The agent: the control thread, what it drives, and switching between modes."""
