"""Plan and make many runs of one kind: a suite of games, a scaling benchmark, a throughput measurement."""
