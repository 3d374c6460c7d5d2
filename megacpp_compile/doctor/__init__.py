"""`megacpp doctor`: what this machine has, who serves attention on it and how fast, and known traps."""
