"""Attention written out as products and a softmax."""
