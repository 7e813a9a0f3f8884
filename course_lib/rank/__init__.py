"""Code that runs in the ranks, and writes what they do to files in the run's folder (see `record.layout`)."""
