"""Memory, lookups and traffic of every rank, known before a run starts."""
