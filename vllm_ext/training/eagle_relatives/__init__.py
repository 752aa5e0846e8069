# SPDX-License-Identifier: Apache-2.0
"""Relatives of the head of EAGLE-3, in training: a paper each."""
