"""Everything here runs under triton's interpreter, in a process of its own.

`tests/kernels/test_interpreted.py` starts it: triton looks at the variable when it is imported.
"""

from __future__ import annotations

import os

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if IS_INTERPRETED else ["*"]

if IS_INTERPRETED:
    import numpy as np
    import torch

    from tests.kernels.interpreted.rounding import round_as_hardware_does

    # -inf and overflow are part of an online softmax; a kernel that turns them into NaN is seen.
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    round_as_hardware_does()
