# SPDX-License-Identifier: Apache-2.0
"""Pages, plots and tables of what was measured; how commands print."""
