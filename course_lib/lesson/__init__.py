"""What a lesson asks of its reader: a guess before a cell runs, and sliders over a picture."""
