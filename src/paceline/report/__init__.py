"""Readers of run directories: figures and pages. Nothing here imports torch or ray."""
