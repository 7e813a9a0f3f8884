"""Measuring tools for single lessons."""
