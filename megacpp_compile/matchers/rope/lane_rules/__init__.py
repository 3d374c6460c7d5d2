"""How each op moves lanes: one function an op, and the table of them all."""

from megacpp_compile.matchers.rope.lane_rules import arithmetic, assembly, complex_numbers, views
from megacpp_compile.matchers.rope.lanes import RuleTable

RULES: RuleTable = {**arithmetic.RULES, **assembly.RULES, **complex_numbers.RULES, **views.RULES}
