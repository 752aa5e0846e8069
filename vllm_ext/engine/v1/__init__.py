# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 model runner."""
