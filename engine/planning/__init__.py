"""What a run takes: memory, lookups and communication of every rank, known before it starts."""
