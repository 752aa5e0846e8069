# SPDX-License-Identifier: Apache-2.0
"""What one request says of its drafts, in ``vllm_xargs``. Flat keys: vLLM takes no objects there."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ext.config import speculative
from vllm_ext.config.allowed import MOST_OTHERS, hint, nearest
from vllm_ext.samplers.messages import quoted

PREFIX = "speculation"


class RequestOptions(BaseModel):
    """Of a request to a server that has a method of ours."""

    model_config = ConfigDict(extra="forbid")

    speculation: bool = Field(
        True, description="False: nothing is drafted for this request, and nothing is learnt from it"
    )
    speculation_max_nodes: int | None = Field(
        None, ge=0, description="most nodes of its trees, where the server's are larger; null: the server's"
    )


def most_nodes(params: Any) -> int | None:
    """How many nodes a request's trees may have; None: as many as the server's. 0: it is switched off.

    Args:
        params: vLLM's SamplingParams, which `check_request` has let through; or None.
    """
    given = None if params is None else params.extra_args
    said = {key: given[key] for key in RequestOptions.model_fields if key in given} if given else {}
    return _most(tuple(said.items())) if said else None


@functools.lru_cache(256)
def _most(said: tuple[tuple[str, Any], ...]) -> int | None:
    asked = RequestOptions.model_validate(dict(said))
    return asked.speculation_max_nodes if asked.speculation else 0


def check_request(vllm_config: Any, params: Any) -> None:
    """Refuse what says nothing that we know.

    Args:
        vllm_config: the engine's.
        params: vLLM's SamplingParams or PoolingParams.

    Raises:
        VLLMValidationError: naming the key, its value and what is allowed.
    """
    given = getattr(params, "extra_args", None)
    if not given or speculative.SPECULATION not in speculative.ours(vllm_config):
        return
    from vllm.exceptions import VLLMValidationError

    known = tuple(RequestOptions.model_fields)
    try:
        for key in itertools.islice((key for key in given if key not in known), MOST_OTHERS):
            if nearest(str(key), known) or str(key).startswith(PREFIX):
                raise ValueError(
                    f"vllm_xargs has an unknown key {quoted(key)}; allowed: {', '.join(known)}.{hint(key, known)} "
                    "Correct or remove it."
                )
        RequestOptions.model_validate({key: given[key] for key in known if key in given})
    except ValidationError as error:
        said = speculative.explain(RequestOptions, error, "Of requests")
        raise VLLMValidationError(f"vllm_xargs: {said}", parameter="vllm_xargs") from None
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
