"""The training loop, and what is decided within it."""
