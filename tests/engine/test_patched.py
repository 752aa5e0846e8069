# SPDX-License-Identifier: Apache-2.0
"""`vllm_ext.patches` lists what is replaced in running engines, and what has another class there."""

from __future__ import annotations

import pytest
from patched import of_worker, replaced
from vllm import LLM

from vllm_ext import patches

pytestmark = pytest.mark.engine


def test_a_worker_has_what_the_table_has(tested_llm: LLM) -> None:
    ((functions, mixins),) = tested_llm.collective_rpc(of_worker)
    assert functions <= set(patches.REPLACED)
    assert mixins == {"vllm_ext.engine.v1.model_runner.SpeculativeRunner"}
    assert replaced() <= set(patches.REPLACED)


def test_plain_vllm_has_nothing_of_ours(plain_llm: LLM) -> None:
    ((functions, mixins),) = plain_llm.collective_rpc(of_worker)
    assert functions == {"vllm.engine.arg_utils.EngineArgs.create_engine_config"}
    assert not mixins
