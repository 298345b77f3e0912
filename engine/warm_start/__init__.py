"""What of a checkpoint fits another run, brought into it: rows by their ids, layers by name."""
