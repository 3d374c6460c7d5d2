"""Attention of a few queries over keys and values that are expanded from cached latents, found by what it computes."""
