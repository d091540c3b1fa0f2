"""Finding out what would go wrong on a machine or between hosts, and what to do about it."""
