"""The delta-rule family as different authors write it: DeltaNet, Gated DeltaNet (arXiv:2412.06464), Kimi Delta
Attention (arXiv:2510.26692), and linear attentions without the delta.

`parts`        l2-norms, inverses of unit triangular matrices, padding, heads of a group
`chunked`      chunks, with an inverse of the triangle within each
`tokens`       loops over tokens
`linear`       what has no delta and no step: GLA, RetNet, lightning attention
`near_misses`  what looks like one of these and is none
`block`        a mixer around any of them

A form of the rule takes q, k [b, t, hk, K], v [b, t, hv, V], g (None, [b, t, hv] or [b, t, hv, K]: log decays), beta
(None or [b, t, hv]), state (None or [b, hv, K, V]), the chunk size, the scale and the norm of q and k; value head i
reads key head i // (hv // hk). It returns o [b, t, hv, V] and the state at the end:

    S <- diag(exp g) S;  S <- S + k (beta (v - S^T k))^T;  o = scale * S^T q        (without the delta: S + k v^T)
"""
