"""What ``tierstore bench`` runs: each benchmark measures against a named baseline."""
