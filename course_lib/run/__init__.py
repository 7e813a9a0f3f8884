"""Reads what the ranks of a run wrote."""
