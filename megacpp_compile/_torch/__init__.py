"""Private symbols of torch, each in one place."""
