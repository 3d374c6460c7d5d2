"""GEMMs below the ops: cuBLASLt candidates, float8 support, linears that share an input."""
