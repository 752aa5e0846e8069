# SPDX-License-Identifier: Apache-2.0
"""What users ask for: options as they write them, checked and frozen. No torch in here."""
