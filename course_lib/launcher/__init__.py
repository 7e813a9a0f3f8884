"""Starts and watches, in the kernel."""
