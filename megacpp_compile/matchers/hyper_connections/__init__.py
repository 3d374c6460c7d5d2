"""Hyper-connections: sums over residual streams, and the weights of those sums, in any spelling."""
