"""Sweeps: grids and Optuna studies of runs, with tables and pictures."""
