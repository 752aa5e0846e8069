# SPDX-License-Identifier: Apache-2.0
"""Parts of the scheduler: mixins in front of vLLM's own. `engine.composed.scheduler` lists them."""
