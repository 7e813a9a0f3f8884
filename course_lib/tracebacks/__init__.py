"""Whose code a line belongs to, and how a process is asked for its Python stacks."""
