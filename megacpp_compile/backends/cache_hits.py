"""Whether code came out of torch's caches, by the counters that its own tests go by."""

from __future__ import annotations

from megacpp_compile._torch.dynamo import counters


def cache_hits() -> int:
    """How many graphs AOTAutograd's and Inductor's caches have served in this process."""
    return counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
