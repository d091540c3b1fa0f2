"""Read runs, group them and compare them. Read-only, and free of torch and Ray."""
