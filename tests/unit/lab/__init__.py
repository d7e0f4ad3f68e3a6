"""The parts of the lab that need no kernel."""
