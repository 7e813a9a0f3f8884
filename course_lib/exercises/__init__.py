"""Asks and judges."""
