# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm_ext.compat import hooks, hooks_v1


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.0+cpu", "0.33.1rc2", "0.33.9.dev3+g123"])
def test_supported_versions(version: str) -> None:
    assert hooks.version_problem(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "dev", ""])
def test_unsupported_versions_name_the_range_and_the_way_out(version: str) -> None:
    problem = hooks.version_problem(version)
    assert problem is not None
    assert ">=0.32,<0.34" in problem
    assert "Install" in problem


def test_this_vllm_has_every_hook() -> None:
    assert hooks.hook_problems(hooks_v1.HOOKS) == []


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (hooks.Hook("vllm.nowhere", "x", None, ""), "missing"),
        (hooks.Hook("vllm.engine.arg_utils", "EngineArgs.nothing", None, ""), "missing"),
        (
            hooks.Hook("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("self", "x"), ""),
            "signature",
        ),
    ],
)
def test_a_moved_symbol_is_found(hook: hooks.Hook, says: str) -> None:
    problem = hook.problem()
    assert problem is not None
    assert says in problem


def test_the_limits_are_vllms_own() -> None:
    from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

    from vllm_ext.proposers.base import MAX_SPECULATIVE_TOKENS

    assert MAX_SPECULATIVE_TOKENS == MAX_SPEC_LEN


def test_check_hooks_raises_with_the_way_out() -> None:
    moved = (hooks.Hook("vllm.nowhere", "x", None, ""),)
    with pytest.raises(RuntimeError, match=r"vllm\.nowhere\.x: missing.*Install vllm"):
        hooks.check_hooks(moved)
