"""Code that reads what the ranks of a run wrote."""
