"""CowClip inside TorchRec's sharded tables."""
