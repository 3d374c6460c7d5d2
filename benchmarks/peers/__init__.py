"""Other people's kernels and modules for the same work, one adapter each: measured where they can be imported.

An adapter gives contestants; building one raises `Missing` with the reason where its package is not there or cannot do
the case. A peer is given copies of what it overwrites, and is checked as everyone else.
"""
