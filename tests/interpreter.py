# SPDX-License-Identifier: Apache-2.0
"""Whether this process has Triton's interpreter, which has to be chosen before Triton is imported.

Without a GPU `test_triton_forms` runs the kernels' tests in one more process, with it.
"""

from __future__ import annotations

import os

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
