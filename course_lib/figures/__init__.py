"""Drawing code that knows nothing of runs."""
