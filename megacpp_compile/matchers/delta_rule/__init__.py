"""The delta rule with gates (DeltaNet, Gated DeltaNet, Kimi Delta Attention), in chunks, however it is written."""
