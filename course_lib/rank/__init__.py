"""What runs in a rank: it only writes (into the run's folder, see `folder`)."""
