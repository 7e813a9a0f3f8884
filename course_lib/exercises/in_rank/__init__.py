"""What runs in the ranks of an exercise, in the same process as the answer."""
