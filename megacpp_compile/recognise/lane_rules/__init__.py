"""How each op moves lanes: one function an op, registered in `lanes.RULES`."""

from megacpp_compile.recognise.lane_rules import arithmetic, assembly, complex_numbers, views  # noqa: F401
