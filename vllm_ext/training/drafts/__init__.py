# SPDX-License-Identifier: Apache-2.0
"""How a draft model begins."""
