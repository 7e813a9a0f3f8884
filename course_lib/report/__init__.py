"""Tells what went wrong: who failed, who waits, and where."""
