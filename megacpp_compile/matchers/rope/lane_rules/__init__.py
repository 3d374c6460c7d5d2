"""How each op moves lanes: one function an op, registered in `lanes.RULES`."""

from megacpp_compile.matchers.rope.lane_rules import arithmetic, assembly, complex_numbers, views  # noqa: F401
