"""Checkpoints that are written atomically."""
