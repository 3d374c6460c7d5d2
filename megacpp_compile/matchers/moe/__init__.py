"""Routed experts in their spellings: loops, gathered and grouped GEMMs, sorted tokens."""
