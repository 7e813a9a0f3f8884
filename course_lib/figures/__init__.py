"""Pictures, drawn by code that knows nothing of runs."""
