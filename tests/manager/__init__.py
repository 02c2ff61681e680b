"""The checkpoint manager. Importing :mod:`tests.property` chooses Hypothesis' profile."""

import tests.property  # noqa: F401
