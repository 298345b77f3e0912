"""Memory and time of every rank, known before a run starts."""
