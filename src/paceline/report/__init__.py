"""Show runs: comparisons, figures, reports and the dashboard. Read-only, and free of torch and Ray."""
