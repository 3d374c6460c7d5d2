"""Rotary embeddings, proved by running the subgraph on symbolic lanes."""
