# SPDX-License-Identifier: Apache-2.0
"""The vLLM that we find: versions, symbols that we rely on, what its platform has."""
