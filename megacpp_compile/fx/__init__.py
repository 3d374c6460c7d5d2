"""Editing captured graphs: builder, placement, aliasing, provenance, subgraphs."""
