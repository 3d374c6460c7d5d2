"""What each op does to dimensions and how it is run again, registered in `tensor_ops.RULES`."""

from megacpp_compile.matchers.ssd.resize_rules import contractions, elementwise, lengths, views  # noqa: F401
