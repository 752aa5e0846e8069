# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner."""
