# SPDX-License-Identifier: Apache-2.0
"""Figures of trained heads on answers held out: how often they are right, and tokens a step."""
