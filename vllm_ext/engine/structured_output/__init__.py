# SPDX-License-Identifier: Apache-2.0
"""Structured output beside drafts: what grammars allow and demand of trees, and the masks of their rows."""
