"""Captured graphs: builder and placement, modes, aliasing, views and casts, provenance, subgraphs."""
