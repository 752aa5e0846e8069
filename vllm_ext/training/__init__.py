# SPDX-License-Identifier: Apache-2.0
"""Draft models, heads of early exits, and thresholds, learnt from the target."""
