"""Clusters of your own machines, reached by ssh: up, submit, attach, fetch, down."""
