"""Grades a class: the judge in the parent, each submission's code behind walls, JSON between them."""
