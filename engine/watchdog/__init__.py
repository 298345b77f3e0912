"""Notices that a run hangs, names the rank and ends the processes, to be restarted."""
