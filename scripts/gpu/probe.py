# SPDX-License-Identifier: Apache-2.0
"""What the suite asks of an engine from inside its worker: a ``worker_extension_cls`` of every engine, plain's too."""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
OF_ONE_STEP = "execute_model", "sample_tokens"
TOP_KERNELS = 40
_DEVICE: Any = vars(torch.autograd)["DeviceType"].CUDA


class Probe:
    """See the file. Works on vLLM's V2 runner."""

    model_runner: Any  # the worker's

    def probe_plant(self, path: str) -> None:
        """From now on the model says what was recorded; see `planted`."""
        from planted import Planter

        runner = self.model_runner
        planter = self._planter = Planter(Path(path), runner.device)
        compute, sample = runner.model.compute_logits, runner.sample
        batch: Any = None

        def computing(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if batch is not None:
                planter.plant(logits, batch, runner.req_states.all_token_ids.gpu)
            return logits

        def sampling(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            nonlocal batch
            batch = input_batch
            try:
                return sample(hidden_states, input_batch, grammar_output)
            finally:
                batch = None

        runner.model.compute_logits, runner.sample = computing, sampling

    def probe_planted(self) -> list[int]:
        """Rows planted since the last call, by kind; the last: none was known."""
        counts: list[int] = self._planter.counts.tolist()
        self._planter.counts.zero_()
        return counts

    def probe_random_weights(self, seed: int) -> float:
        """Weights that answer surely, the same in every engine of one machine; returns a sum that says so."""
        generator = torch.Generator(self.model_runner.device).manual_seed(seed)
        total = 0.0
        for name, weight in self.model_runner.model.named_parameters():
            if weight.dim() < 2:
                weight.data.fill_(1.0)
                continue
            scale = 1.0 if "embed" in name else (3.0 if "lm_head" in name else 0.7) * weight.shape[1] ** -0.5
            drawn = torch.randn(weight.shape, generator=generator, device=weight.device) * scale
            weight.data.copy_(drawn)
            total += float(drawn.double().abs().sum())
        return total

    def probe_level(self, level: int | None) -> list[int]:
        """Make the goodput budget choose one level, or let it choose again; returns all levels."""
        budget = _budget()
        if budget is None:
            return []
        vars(budget).pop("choose", None)
        if level is not None:
            budget.choose = lambda batch_size: level
        levels: list[int] = budget.levels
        return levels

    def probe_budget(self) -> list[dict[str, Any]]:
        """What the goodput budget has measured."""
        budget = _budget()
        return [] if budget is None else budget.measured()

    def probe_forget(self) -> None:
        """Our drafter knows nothing, as when the server starts; vLLM's are left alone."""
        from vllm_ext.engine.v2.speculators.base import TreeSpeculator

        speculator: Any = getattr(self.model_runner, "speculator", None)
        if isinstance(speculator, TreeSpeculator):
            speculator.forget()

    def probe_watch(self) -> None:
        """Count steps from now on, and the host's time in them."""
        runner = self.model_runner
        watch = self._watch = _Watch()
        for name in OF_ONE_STEP:
            setattr(runner, name, watch.timed(name, getattr(runner, name)))

    def probe_steps(self) -> dict[str, Any]:
        """What was counted since the last call."""
        return self._watch.take()

    def probe_arm(self, skip: int, steps: int) -> None:
        """Profile so many decoding steps, behind so many that are not."""
        self._watch.arm(skip, steps)

    def probe_profile(self) -> dict[str, Any]:
        """What the armed profile saw."""
        return self._watch.profile()


class _Watch:
    """Counts and times of a runner's steps."""

    def __init__(self) -> None:
        self._skip = self._left = self._profiled = 0
        self._profiler: Any = None
        self._started = self._wall = 0.0
        self.take()

    def take(self) -> dict[str, Any]:
        """Counts since the last call."""
        taken = dict(vars(self).get("_counts", {}))
        self._counts: Counter[str] = Counter()
        return taken

    def timed(self, name: str, call: Any) -> Any:
        """The runner's method, counted and timed."""

        def timing(*args: Any, **kwargs: Any) -> Any:
            if name == OF_ONE_STEP[0] and args and not kwargs.get("dummy_run"):
                self._begin(args[0])
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._counts[f"{name}_us"] += int(1e6 * (time.perf_counter() - started))

        return timing

    def _begin(self, scheduled: Any) -> None:
        requests = len(scheduled.num_scheduled_tokens)
        new = len(scheduled.scheduled_new_reqs)
        if not requests:
            return
        drafts = scheduled.scheduled_spec_decode_tokens
        self._counts["steps"] += 1
        self._counts["decode_steps"] += not new
        self._counts["decode_request_steps"] += requests - new
        self._counts["drafts"] += sum(map(len, drafts.values()))
        if not new:
            self._counts[f"level_{max(map(len, drafts.values()), default=0)}"] += 1
        if self._left and not new:
            self._skip -= 1
            if self._skip < 0:
                self._profile_step()

    def arm(self, skip: int, steps: int) -> None:
        """See `Probe.probe_arm`."""
        self._skip, self._left, self._profiled = skip, steps, 0
        self._profiler = None

    def _profile_step(self) -> None:
        if self._profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            _synchronize()
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            self._started = time.perf_counter()
        elif self._profiled == self._left:
            _synchronize()
            self._wall = time.perf_counter() - self._started
            self._profiler.stop()
            self._left = 0
            return
        self._profiled += 1

    def profile(self) -> dict[str, Any]:
        """See `Probe.probe_profile`."""
        if self._profiler is None or self._left:
            return {"steps": 0}
        steps = self._profiled
        host: Counter[str] = Counter()
        kernels: Counter[str] = Counter()
        kernel_us: Counter[str] = Counter()
        spans = []
        for event in self._profiler.events():
            if event.device_type == _DEVICE:
                if getattr(event, "is_user_annotation", False):
                    continue
                start, end = event.time_range.start, event.time_range.end
                spans.append((start, end))
                kernels[event.name] += 1
                kernel_us[event.name] += end - start
            elif event.name.startswith(("cuda", "cu")) or event.name.startswith("aten::"):
                host[event.name] += 1
        busy, reached = 0.0, float("-inf")
        for start, end in sorted(spans):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        launches = sum(count for name, count in host.items() if name.startswith(LAUNCHES))
        return {
            "steps": steps,
            "wall_us": 1e6 * self._wall / steps,
            "busy_us": busy / steps,
            "launches": launches / steps,
            "calls": {name: count / steps for name, count in host.most_common() if name.startswith("cu")},
            "operators": {n: c / steps for n, c in host.most_common(TOP_KERNELS) if n.startswith("aten::")},
            "kernels": [
                [name[:120], kernels[name] / steps, us / steps]
                for name, us in kernel_us.most_common(TOP_KERNELS)
            ],
            "num_kernels": sum(kernels.values()) / steps,
        }


def _remember_budgets() -> None:
    """A scheduler is made after its worker has loaded this file."""
    from vllm_ext.engine.scheduler.budget import Budget

    make = Budget.__init__

    def making(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _budgets.append(self.budget)

    Budget.__init__ = making  # type: ignore[method-assign]


_budgets: list[Any] = []
_remember_budgets()


def _alone(holder: Any, name: str, exclusive: bool) -> None:
    """Let a function of an engine's start wait for other engines: what is timed runs alone on the device."""
    call = getattr(holder, name)
    bound = isinstance(vars(holder)[name], classmethod)

    def waiting(*args: Any, **kwargs: Any) -> Any:
        with open(os.environ["GPU_SUITE_LOCK"], "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            return call(*(args[1:] if bound else args), **kwargs)

    setattr(holder, name, classmethod(waiting) if bound else waiting)


if os.environ.get("GPU_SUITE_LOCK"):
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_ext.engine.attention.flash import TreeFlashAttentionImpl

    for part in ("load_model", "determine_available_memory", "compile_or_warm_up_model"):
        _alone(Worker, part, exclusive=False)
    _alone(TreeFlashAttentionImpl, "choose", exclusive=True)


def _budget() -> Any:
    """The goodput budget of this process's scheduler; None where there is none."""
    return _budgets[0] if _budgets else None


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
