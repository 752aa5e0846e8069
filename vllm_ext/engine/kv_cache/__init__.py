# SPDX-License-Identifier: Apache-2.0
"""Encoded KV caches in the engine."""
