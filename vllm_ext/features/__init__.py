# SPDX-License-Identifier: Apache-2.0
"""What a server can be asked for beside vLLM's own options: how each turns into options that vLLM knows."""
