# SPDX-License-Identifier: Apache-2.0
"""Trees in layers with a recurrent state: Mamba-2 and gated delta nets."""
