# SPDX-License-Identifier: Apache-2.0
"""Files that commands read and write: prompts, documents, datastores, tries, answers."""
