"""Scores of trained models: from a checkpoint, and in packages that need no stampede."""
