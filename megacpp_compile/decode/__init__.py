"""Decoding with latent attention: the cache of latents, attention that reads it, and what serving has to say of it."""
