"""Settings of all tests."""

from hypothesis import settings

# A machine that is busy is not wrong.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
