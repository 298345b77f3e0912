"""What watches a run: heartbeat, hangs, signals, step times, clipped rows."""
