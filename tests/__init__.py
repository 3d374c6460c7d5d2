"""Imports make millions of objects that stay, and compiling makes graphs that hold themselves: garbage is looked for twenty
thousand times as seldom as Python would, at some two gigabytes of it. Each search takes as long as what it frees was many."""

import gc

gc.set_threshold(20_000_000, 20, 20)
