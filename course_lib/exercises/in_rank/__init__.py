"""What runs in the ranks of an exercise, in one process with the answer."""
