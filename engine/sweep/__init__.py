"""Sweeps: grids and studies of runs, their tables and pictures."""
