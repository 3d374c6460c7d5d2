"""Repeated blocks compiled in place, one artifact for each kind."""
