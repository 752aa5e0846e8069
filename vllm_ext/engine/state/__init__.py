# SPDX-License-Identifier: Apache-2.0
"""What methods and rules have learnt, on disk."""
