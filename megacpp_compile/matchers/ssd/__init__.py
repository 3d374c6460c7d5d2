"""Mamba-2's chunked scan, proved by running the subgraph at small sizes beside the recurrence."""
