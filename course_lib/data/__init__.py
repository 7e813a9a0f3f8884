"""What the lessons train on."""
