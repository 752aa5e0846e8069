# SPDX-License-Identifier: Apache-2.0
"""Drafting with passes of a model, on vLLM's V1 runner."""
