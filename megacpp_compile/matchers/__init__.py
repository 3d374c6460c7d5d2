"""What an idiom is, told by meaning from a captured graph. Matchers change nothing."""
