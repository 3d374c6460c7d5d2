"""Matchers of routed experts, one module a family of spellings; each has `find(view)`, which yields `RoutedExperts` and
failures."""
