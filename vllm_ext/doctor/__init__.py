# SPDX-License-Identifier: Apache-2.0
"""What this environment supports."""
