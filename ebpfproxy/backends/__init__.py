"""One package per kernel mechanism, behind one interface. None knows another, and none an API object."""
