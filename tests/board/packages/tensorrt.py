"""`tensorrt`, imitated, for processes that tests start.

IMITATED_TENSORRT is its version, IMITATED_SECONDS how long a build takes.
"""

import os

from pycuda.driver import GPU

from tests.runtime.fake_tensorrt import imitation

globals().update(
    vars(
        imitation(
            GPU,
            os.environ["IMITATED_TENSORRT"],
            seconds=float(os.environ.get("IMITATED_SECONDS", "0")),
        )
    )
)
