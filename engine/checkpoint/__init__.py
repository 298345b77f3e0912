"""Checkpoints: tables, dense layers, both optimizers, position, configuration."""
