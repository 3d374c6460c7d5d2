"""Imports make millions of objects that stay: garbage is looked for a thousand times as seldom as Python would. Not more
seldom still: each graph module is a class of its own, and each trace writes to all classes of modules that are there."""

import gc

gc.set_threshold(1_000_000, 20, 20)
