"""Engines: where a run happens. One loop, in `loop.py`."""
