from tests.backends.conftest import fresh  # noqa: F401
from tests.sharding.one_rank import one_rank  # noqa: F401
