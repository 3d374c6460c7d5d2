"""Memory before it is allocated: estimates, the cheapest policy that fits, time against peak."""
