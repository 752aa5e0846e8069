# SPDX-License-Identifier: Apache-2.0
"""What one request says of its drafts, in ``vllm_xargs``. Flat keys: vLLM takes no objects there."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ext.config import speculative
from vllm_ext.config.allowed import MOST_OTHERS, hint, nearest
from vllm_ext.proposers.base import MethodOptions
from vllm_ext.proposers.sure_text import EntropyRule
from vllm_ext.samplers.messages import quoted
from vllm_ext.samplers.typical_acceptance import Typical

PREFIX = "speculation"
LEAST_TEMPERATURE = 1e-5  # below it vLLM takes the argmax
# By verification, the options that it alone reads.
OF_RULE = {
    "typical": ("verify_threshold", "verify_alpha"),
    speculative.ENTROPY: ("verify_entropy", "verify_window"),
    speculative.REFLECTIVE: ("verify_weight",),
}


class RequestOptions(BaseModel):
    """Of a request to a server that has a method of ours."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    speculation: bool = Field(
        True, description="False: nothing is drafted for this request, and nothing is learnt from it"
    )
    speculation_max_nodes: int | None = Field(
        None, ge=0, description="most nodes of its trees, where the server's are larger; null: the server's"
    )
    verify: Literal["exact", "typical", "entropy", "reflective"] | None = Field(
        None,
        description="exact: its answer is the one without drafts; typical, entropy, reflective: lossy, without a "
        "seed and on V1; null: the server's",
    )
    verify_threshold: float | None = Field(
        None, gt=0.0, le=1.0, description="of typical, see the server's; null: the server's"
    )
    verify_alpha: float | None = Field(
        None,
        gt=0.0,
        description="likewise; null: the server's, or the square root of the threshold where it has none",
    )
    verify_entropy: float | None = Field(
        None, ge=0.0, le=100.0, description="of entropy, see the server's; null: the server's"
    )
    verify_window: int | None = Field(None, ge=1, le=1024, description="likewise")
    verify_weight: float | None = Field(None, ge=0.0, le=1.0, description="of reflective, likewise")


def most_nodes(params: Any) -> int | None:
    """How many nodes a request's trees may have; None: as many as the server's. 0: it is switched off.

    Args:
        params: vLLM's SamplingParams, which `check_request` has let through; or None.
    """
    asked = _asked(params)
    return asked.speculation_max_nodes if asked.speculation else 0


def typical(options: MethodOptions, params: Any) -> Typical | None:
    """The rule by which a request's drafts are verified lossily; None: they are verified exactly.

    So are those of greedy requests, whose typical tokens are the target's own, and of requests with a seed, which are
    to have the same answer whatever was drafted.

    Args:
        options: of the server's method.
        params: as in `most_nodes`.
    """
    if params is None or params.seed is not None or params.temperature < LEAST_TEMPERATURE:
        return None
    asked = _asked(params)
    if (asked.verify or options.verify) != "typical":
        return None
    threshold = asked.verify_threshold or options.verify_threshold
    return Typical(threshold, asked.verify_alpha or options.verify_alpha or threshold**0.5)


def entropy_rule(options: MethodOptions, params: Any) -> EntropyRule | None:
    """The rule by which a draft model's text is taken for a request; None: its drafts are verified.

    So are those of requests with a seed. Greedy ones get the draft model's likeliest tokens.

    Args:
        options: of the server's method, which has a draft model.
        params: as in `most_nodes`.
    """
    asked = _asked(params)
    if (asked.verify or options.verify) != speculative.ENTROPY or params is None or params.seed is not None:
        return None
    threshold = options.verify_entropy if asked.verify_entropy is None else asked.verify_entropy
    return EntropyRule(threshold, asked.verify_window or options.verify_window)


def reflection_weight(options: MethodOptions, params: Any) -> float | None:
    """How much the second judgement of a request's drafts counts; None: they are judged once.

    So are those of requests with a seed or with structured output, whose grammar the second copy would break.

    Args:
        options: as in `entropy_rule`.
        params: as in `most_nodes`.
    """
    asked = _asked(params)
    if (asked.verify or options.verify) != speculative.REFLECTIVE or params is None:
        return None
    if params.seed is not None or params.structured_outputs is not None:
        return None
    return options.verify_weight if asked.verify_weight is None else asked.verify_weight


def _asked(params: Any) -> RequestOptions:
    given = None if params is None else params.extra_args
    said = {key: given[key] for key in RequestOptions.model_fields if key in given} if given else {}
    return _validated(tuple(said.items()))


@functools.lru_cache(256)
def _validated(said: tuple[tuple[str, Any], ...]) -> RequestOptions:
    return RequestOptions.model_validate(dict(said))


def _check_verification(vllm_config: Any, asked: RequestOptions, params: Any) -> None:
    """Refuse a lossy verification that would not take place.

    Raises:
        ValueError: naming what is in its way.
    """
    settings = speculative.from_vllm_config(vllm_config)
    verify = asked.verify or (settings.options.verify if settings is not None else "exact")
    said = [
        (rule, name) for rule, names in OF_RULE.items() for name in names if getattr(asked, name) is not None
    ]
    for rule, name in said:
        if rule != verify:
            how = "exactly" if verify == "exact" else f"by verify={verify!r}"
            raise ValueError(
                f"{name}={getattr(asked, name)} goes with verify={rule!r}, and drafts of this request are verified "
                f"{how}. Say verify={rule!r}, or leave {name} out."
            )
    if asked.verify in (None, "exact") and not said:
        return
    if settings is not None:
        speculative.check_text(settings.with_options(verify=verify))
    if verify == speculative.REFLECTIVE and params.structured_outputs is not None:
        raise ValueError(
            "verify='reflective' does not go with structured_outputs: the grammar ends with the first copy of a draft. "
            "Leave one of the two out."
        )
    if params.seed is not None:
        raise ValueError(
            f"seed={params.seed} does not go with {said[0][1] if said else 'verify'}: what is drafted differs from run "
            "to run, and a lossy answer with it. Leave the seed out, or say verify='exact'."
        )
    if vllm_config.use_v2_model_runner:
        raise ValueError(
            f"verify={verify!r} is not allowed here; allowed on vLLM's V2 model runner: 'exact'. Serve with "
            f"VLLM_USE_V2_MODEL_RUNNER=0 or with verify={verify!r} in --speculative-config, which take V1."
        )


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
        asked = RequestOptions.model_validate({key: given[key] for key in known if key in given})
        _check_verification(vllm_config, asked, params)
    except ValidationError as error:
        said = speculative.explain(RequestOptions, error, "Of requests")
        raise VLLMValidationError(f"vllm_xargs: {said}", parameter="vllm_xargs") from None
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
