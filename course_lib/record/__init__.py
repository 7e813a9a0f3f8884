"""The files in a run's folder: their layout, how ranks write them, how they are read."""
