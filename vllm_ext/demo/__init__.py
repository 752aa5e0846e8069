# SPDX-License-Identifier: Apache-2.0
"""The demo: its servers and its model."""
