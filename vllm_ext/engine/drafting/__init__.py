# SPDX-License-Identifier: Apache-2.0
"""What drafters are made of, on either of vLLM's model runners."""
