"""What is not collected with the other tests; Hypothesis profiles are known before they are imported."""

from property_tests.profiles import register

register()
collect_ignore = ["third_party_tier"]
