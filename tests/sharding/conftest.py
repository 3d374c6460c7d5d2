from tests.backends.conftest import fresh  # noqa: F401
from tests.sharding.one_rank import one_rank, two_ranks  # noqa: F401
from tests.sharding.seen import seen  # noqa: F401
