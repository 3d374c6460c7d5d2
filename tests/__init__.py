"""Imports make millions of objects that stay: garbage is looked for a thousand times as seldom as Python would."""

import gc

gc.set_threshold(1_000_000, 20, 20)
