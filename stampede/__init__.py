"""Trains click-through-rate models with very large batches, with CowClip inside TorchRec."""

__version__ = "0.1.0"
