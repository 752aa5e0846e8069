# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-ext`` commands."""
