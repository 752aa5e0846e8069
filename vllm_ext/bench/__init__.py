# SPDX-License-Identifier: Apache-2.0
"""Measuring: methods on engines and servers, and encoded KV caches."""
