"""What runs in a rank, and only writes: into the run's folder, whose files `run_folder` names."""
