"""The training loop, and what it needs around an engine: time accounting, stop rules, signals, memory limits."""
