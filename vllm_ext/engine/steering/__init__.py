# SPDX-License-Identifier: Apache-2.0
"""What rules that steer read beside the step's logits, on either runner."""
