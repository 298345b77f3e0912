"""The run: configuration, processes, sharding, training loop, evaluation, checkpoints."""
