"""A pytest plugin: property tests whose outcome does not depend on how busy the machine is.

hypothesis fails a test by its own clock where an example takes 0.2 s, or where making examples is slow. In continuous
integration the examples are the same in every run.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("patient")
