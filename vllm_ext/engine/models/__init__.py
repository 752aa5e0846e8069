# SPDX-License-Identifier: Apache-2.0
"""Models beside or inside the target: second models, layers, heads, linear layers."""
