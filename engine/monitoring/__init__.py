"""What a run does: time by phase, the slowest rank, memory, logs of each rank, traces."""
