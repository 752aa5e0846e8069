# SPDX-License-Identifier: Apache-2.0
"""Logits processors of the user's own, by either of vLLM's two interfaces."""
