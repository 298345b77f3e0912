"""Helpers of the tests, importable also in the processes that tests start."""
