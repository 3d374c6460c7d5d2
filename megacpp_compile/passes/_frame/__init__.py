"""What is told of a whole frame beside its passes: `analysis.py` and `pipeline.py` ask for it."""
