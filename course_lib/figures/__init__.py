"""Draws, and knows no run."""
