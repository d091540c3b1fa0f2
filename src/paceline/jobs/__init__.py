"""Submitting jobs, and finding out what became of them."""
