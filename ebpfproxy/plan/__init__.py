"""What this node must do, settled once for every backend. Pure: no clock, no file, no kernel.

Every rule of Kubernetes about which client reaches which endpoint is decided here, and only here.
Nothing here knows how a backend works.
"""
