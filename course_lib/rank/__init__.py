"""Code that runs in the ranks: it only writes, to files in the run's folder (see `run_folder`)."""
