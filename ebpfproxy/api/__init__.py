"""Where the cluster's state comes from: the API server, or manifests in a folder.

A source turns what it reads into events and puts them into the one queue of the control thread.
It never decides what is done about them, and nothing outside `parse`, `parts` and `fields` knows an API
field's name.
"""
