# SPDX-License-Identifier: Apache-2.0
"""Verification that changes the answers, for the requests that ask for it."""
