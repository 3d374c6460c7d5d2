"""Losses over a vocabulary whose logits are a linear's: what reads the logits, and through which rows."""
