"""Files that are written atomically, and checkpoints."""
