# SPDX-License-Identifier: Apache-2.0
"""The Python that we need. An old one imports this file: nothing here is newer than Python 3.7."""

MIN_PYTHON = (3, 10)
PYTHON_WAY_OUT = (
    "install vllm-ext with Python 3.10 or newer, as vLLM itself needs: python3.12 -m venv ENVIRONMENT"
)
