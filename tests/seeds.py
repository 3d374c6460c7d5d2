"""The seed of a test: its own name, so that every run draws the same inputs. Fresh draws are the fuzz drivers'."""

from __future__ import annotations

import os
import zlib


def seed_of(name: str) -> int:
    """31 bits from the name of a test, "test_file.py::test_case[parameters]"; `TEST_SEED=123` sets another."""
    return int(os.environ.get("TEST_SEED") or zlib.crc32(name.encode()) >> 1)
