"""Start ranks and watch them, from the notebook's kernel."""
