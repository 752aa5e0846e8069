# SPDX-License-Identifier: Apache-2.0
"""Models and heads that draft in vLLM's V2 worker."""
