"""Environments: an id becomes a vector environment whose observations and actions are plain arrays."""
