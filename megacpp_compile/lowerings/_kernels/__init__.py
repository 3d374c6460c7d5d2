"""Device code and launch helpers that several lowerings share."""
