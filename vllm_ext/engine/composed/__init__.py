# SPDX-License-Identifier: Apache-2.0
"""One scheduler and one worker, made of the parts that an engine has asked for."""
