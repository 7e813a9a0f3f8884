"""The data sets that the lessons train on."""
