"""Private symbols of torch, and nothing else of this package names one.

The modules here hand them out by theme, `from megacpp_compile._torch.fakes import FakeTensor`. Each looks a symbol up
when it is asked for, so that importing one loads nothing of torch. `symbols` is the table of them all: what each is
for, the releases it was seen in, and what happens where a torch lacks it. `tests/_torch` asks this torch for every row.
"""

from megacpp_compile._torch._registry import present
