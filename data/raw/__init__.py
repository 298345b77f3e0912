"""Raw click logs, read in chunks of typed rows."""
