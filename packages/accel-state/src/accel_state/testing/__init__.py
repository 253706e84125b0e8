"""Tests on several ranks that cost milliseconds.

A process that has imported torch once is kept, and forks the ranks of each test. `run_ranks` needs no pytest; with
pytest use the fixture `ranks`, by `-p accel_state.testing` or `from accel_state.testing import ranks` in a conftest.
"""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from accel_state.testing.fixture import ranks as ranks
    from accel_state.testing.pool import RankPool as RankPool
    from accel_state.testing.pool import run_ranks as run_ranks

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"pool": ["run_ranks", "RankPool"], "fixture": ["ranks"]})
