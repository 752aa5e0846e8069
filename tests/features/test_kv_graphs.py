# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs beside a KV method that asks rows which decode what they attend to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode

from vllm_ext.features.kv_cache import keep_attention_out_of_graphs


@pytest.mark.parametrize(
    ("mode", "splits", "expected"),
    [
        ("FULL_AND_PIECEWISE", True, "PIECEWISE"),
        ("FULL_DECODE_ONLY", True, "PIECEWISE"),
        ("FULL_DECODE_ONLY", False, "NONE"),
        ("FULL", False, "NONE"),
        ("PIECEWISE", True, "PIECEWISE"),
        ("NONE", False, "NONE"),
    ],
)
def test_attention_is_in_no_graph(mode: str, splits: bool, expected: str) -> None:
    config = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode[mode], splitting_ops_contain_attention=lambda: splits
    )
    keep_attention_out_of_graphs(config)
    assert config.cudagraph_mode == CUDAGraphMode[expected]


def test_what_is_not_chosen_yet_stays() -> None:
    config = SimpleNamespace(cudagraph_mode=None)
    keep_attention_out_of_graphs(config)
    assert config.cudagraph_mode is None
