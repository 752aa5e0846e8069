# SPDX-License-Identifier: Apache-2.0
"""Attention backends that verify draft trees."""
