"""This machine: its hardware, what Slurm says, where the course keeps its files, and the notebook."""
