# SPDX-License-Identifier: Apache-2.0
"""What drafts that were trained are worth, on answers held out."""
