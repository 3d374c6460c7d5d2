"""Measurements behind the figures in docs/. Each module has --help and prints the table it writes."""
