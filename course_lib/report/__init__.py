"""Report what went wrong: which ranks failed or wait, and where."""
