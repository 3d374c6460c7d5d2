"""What is told of a whole frame beside its passes: `pipeline.py` asks for it."""
