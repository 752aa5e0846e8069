# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's KV connectors may stand beside trees."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import EngineArgs
from vllm.config import KVTransferConfig

TREES = {"method": "token_recycling"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
}


def both(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def made(model_dir: str, method: dict[str, Any], connector: dict[str, Any]) -> Any:
    args = EngineArgs(
        model=model_dir,
        speculative_config=method,
        dtype="float32",
        max_model_len=256,
        kv_transfer_config=KVTransferConfig(**connector),
    )
    return args.create_engine_config()


@pytest.mark.parametrize("connector", [NIXL, OFFLOADING, both(NIXL, OFFLOADING)])
def test_connectors_beside_trees(model_dir: str, connector: dict[str, Any]) -> None:
    found = made(model_dir, TREES, connector).kv_transfer_config
    assert found.kv_connector == connector["kv_connector"]


@pytest.mark.parametrize(
    ("connector", "message"),
    [
        (
            {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
            "the KV connector 'LMCacheConnectorV1' .* must be 'ExampleConnector' or .*'NixlConnector'",
        ),
        (
            both(NIXL, {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}),
            "the KV connector 'MooncakeConnector'",
        ),
        (
            {**NIXL, "kv_connector_extra_config": {"bidirectional_kv_xfer": True}},
            "with bidirectional_kv_xfer=True: it must be without",
        ),
    ],
)
def test_others_are_refused_by_name(model_dir: str, connector: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(model_dir, TREES, connector)


def test_methods_with_passes_are_refused(model_dir: str) -> None:
    with pytest.raises(ValueError, match=r"a connector would save before it is right.*'token_recycling'"):
        made(model_dir, {"method": "layerskip", "exit_layer": 8}, NIXL)
