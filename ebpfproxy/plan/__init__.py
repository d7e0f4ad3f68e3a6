"""What this node must do, settled once for every dataplane. Pure: no clock, no file, no kernel.

Every rule of Kubernetes about which client reaches which endpoint is decided here, and only here.
Nothing here knows how a dataplane works.
"""
