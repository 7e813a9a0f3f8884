"""Ask the questions of the exercises and judge the answers."""
