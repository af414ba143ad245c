"""Fixtures of these tests, so that they run without those of the whole suite, and without what these import:

python -m pytest tests/gpu --confcutdir tests/gpu
"""

from __future__ import annotations

from tests.support.llama import llama

__all__ = ["llama"]
