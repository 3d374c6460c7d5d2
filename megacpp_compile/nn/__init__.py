"""What a model calls itself: attention, top-k sparse MLA, expert capacity."""
