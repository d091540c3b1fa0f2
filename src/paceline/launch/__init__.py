"""Placing a command on machines, and finding out what would go wrong there."""
