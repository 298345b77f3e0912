"""Runs that are killed and disturbed at random, and what they must come to nevertheless."""
