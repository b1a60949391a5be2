"""Profiles with numbers of examples: `pytest property_tests --hypothesis-profile=default|ci|nightly`.

`ci` makes the same examples in every run, so only a change of the code can make a test fail. `default` makes other
examples in every run and keeps failing examples. `nightly` makes 20 times as many examples.
"""

from __future__ import annotations

from hypothesis import settings

TIMES = {"default": 1, "ci": 1, "nightly": 20}


def register() -> None:
    """Register the profiles with Hypothesis."""
    settings.register_profile("default", deadline=None, print_blob=True)
    settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
    settings.register_profile("nightly", deadline=None, print_blob=True)


def examples(count: int, steps: int | None = None) -> settings:
    """Return the profile's settings for a test that makes `count` examples by default, of `steps` rules each."""
    times = TIMES.get(settings.get_current_profile_name(), 1)
    if steps is None:
        return settings(max_examples=count * times)
    return settings(max_examples=count * times, stateful_step_count=steps)
