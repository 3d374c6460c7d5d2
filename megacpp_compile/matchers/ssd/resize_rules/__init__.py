"""What each op does to dimensions and how it is run at other sizes, and the table of them all."""

from megacpp_compile.matchers.ssd.resize_rules import contractions, elementwise, lengths, views, writes
from megacpp_compile.matchers.ssd.tensor_ops import RuleTable

RULES: RuleTable = {**contractions.RULES, **elementwise.RULES, **lengths.RULES, **views.RULES, **writes.RULES}
