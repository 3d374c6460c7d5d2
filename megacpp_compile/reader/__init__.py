"""What a value is, for matching alone: the chain of casts and views behind it, and products by labelled dimensions."""
