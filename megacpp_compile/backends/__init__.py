"""Compilers of lowered graphs: Inductor, openxla (torch_xla) and torch_tpu."""
