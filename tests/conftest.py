"""Settings of every test."""

from __future__ import annotations

from hypothesis import settings

# No deadline: machines that run tests are shared. The rest is hypothesis' own choice, which is
# reproducible where it sees continuous integration.
settings.register_profile("project", parent=settings(), deadline=None, max_examples=30)
settings.load_profile("project")
