"""Hypothesis profiles are known before the tests are imported."""

from __future__ import annotations

from property_tests.profiles import register

register()
