"""Collecting: a policy and a vector environment fill a batch."""
