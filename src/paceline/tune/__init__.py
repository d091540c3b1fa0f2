"""`paceline tune`: many trials, each an ordinary run, scheduled by Ray Tune."""
