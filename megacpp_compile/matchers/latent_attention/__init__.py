"""Attention over keys and values that are expanded from latents, found by what it computes."""
