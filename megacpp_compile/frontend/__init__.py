"""From Dynamo's graph to a captured, functional pre-dispatch ATen graph with fake metadata and names."""
