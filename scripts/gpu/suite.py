# SPDX-License-Identifier: Apache-2.0
"""All that is to be known of a GPU, in one short run: `scripts/gpu/README.md`.

    python scripts/gpu/suite.py --traces traces.npz --out results.jsonl --seconds 420

Results are written down one by one, as they come: a run that is cut off leaves what it has. Engines start together,
each in processes of its own, and are timed one after the other. `page.py` makes a page of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import correctness  # noqa: E402
import heads  # noqa: E402
import kept_kv  # noqa: E402
from engines import Engine, Failed, Results  # noqa: E402
from shapes import CORRECT, DRY, SHAPES, Shape  # noqa: E402
from traces import Traces  # noqa: E402

STARTING_S = 240.0
WARM_UP_TRACES = 16  # the first of them; the others are timed
WARM_UP_TOKENS = 96
NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
Method = dict[str, Any] | None
METHODS: dict[str, Method] = {
    "plain": None,
    "ngram_gpu": NGRAM,
    "token_recycling": {"method": "token_recycling"},
    "hybrid": {"method": "hybrid"},
}
OURS = ("token_recycling", "hybrid")
HEAD = "eagle_tree"  # with random weights it is never right: what its steps cost is to be known, alone
ANATOMY = ("plain", "token_recycling")


class Suite:
    """The stages; each may fail and leaves the others alone."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.dry: bool = arguments.dry
        self.results = Results(arguments.out, arguments.seconds)
        self.traces_path: Path = arguments.traces
        self.traces = Traces.load(arguments.traces)
        self.work: Path = arguments.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.rounds: int = arguments.rounds
        self.batches: list[int] = arguments.batches
        self.engines: dict[str, Engine] = {}

    def guarded(self, stage: str, needs_s: float, run: Callable[..., None], *arguments: Any) -> None:
        """Run a stage if there is time for it."""
        if self.results.left_s < needs_s:
            self.results.add("skipped", what=stage, left_s=round(self.results.left_s))
            return
        try:
            run(*arguments)
        except Exception as error:
            self.results.add("failed", what=stage, error=f"{type(error).__name__}: {error}"[-3000:])

    # Engines

    def start(self, group: str, shape: Shape, methods: Mapping[str, Method], **options: Any) -> None:
        """Begin to start engines named ``group/method``.

        Args:
            group: the first part of their names.
            shape: of the model.
            methods: vLLM's ``speculative_config`` by name; None is plain.
            options: of vLLM's ``LLM``, next to those that all engines have.
        """
        folder = shape.write(self.work / group)
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if self.dry else {}
        if shape.dtype == "float32":
            environment["TRITON_F32_DEFAULT"] = "ieee"  # not TF32: answers are compared
        for name, method in methods.items():
            full = f"{group}/{name}"
            self.engines[full] = Engine(
                full.replace("/", "-"),
                {
                    "model": str(folder),
                    "load_format": "dummy",
                    "skip_tokenizer_init": True,
                    "dtype": shape.dtype,
                    "seed": 0,
                    "max_model_len": shape.max_model_len,
                    "max_num_seqs": shape.max_num_seqs,
                    "max_num_batched_tokens": shape.max_num_batched_tokens,
                    "enable_prefix_caching": False,
                    "disable_log_stats": False,
                    "worker_extension_cls": "probe.Probe",
                    "speculative_config": method,
                    **(self._on_cpu() if self.dry else self._on_gpu(shape)),
                    **options,
                },
                self.work,
                environment,
            )

    def start_correct(self) -> None:
        """Engines whose answers are compared: trees in graphs and without, of sizes that fill tiles and do not."""
        options: dict[str, Any] = {"enable_prefix_caching": True}
        fixed = {"budget": "fixed", "num_speculative_tokens": 6}
        graphs: dict[str, Method] = {"plain": None, **{name: {"method": name, **fixed} for name in OURS}}
        graphs["dyspec"] = {"method": "dyspec", "model": "self", "self_layers": 1, **fixed}
        shape = CORRECT["float32"]
        for name, write in (("eagle_tree", heads.eagle), ("medusa_tree", heads.medusa)):
            graphs[name] = {"method": name, "model": write(shape, self.work / f"float32-{name}"), **fixed}
        head = {"method": HEAD, "model": graphs[HEAD]["model"]}  # type: ignore[index]
        drafters = ["token_recycling", "suffix_tree", head]
        graphs["hybrid with a head"] = {"method": "hybrid", "drafters": drafters, **fixed}
        larger = {"method": "token_recycling", "budget": "fixed", "num_speculative_tokens": 15}
        if self.dry:
            self.start("float32", CORRECT["float32"], {**graphs, "token_recycling 15": larger}, **options)
            return
        self.start("bfloat16", CORRECT["bfloat16"], {"plain": None, "token_recycling 15": larger}, **options)
        options["attention_backend"] = "TRITON_ATTN"  # FlashAttention has no float32
        self.start("float32", CORRECT["float32"], {**graphs, "token_recycling 15": larger}, **options)
        options |= {"enforce_eager": True, "compilation_config": None}
        self.start("float32", CORRECT["float32"], {"token_recycling eager": larger}, **options)

    @staticmethod
    def _on_cpu() -> dict[str, Any]:
        return {
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "block_size": 32,
            "num_gpu_blocks_override": 64,
        }

    @staticmethod
    def _on_gpu(shape: Shape) -> dict[str, Any]:
        return {
            "gpu_memory_utilization": 0.05,  # what follows decides; this must be free when it starts
            "kv_cache_memory_bytes": shape.kv_cache_bytes,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        }

    def wait(self, group: str) -> dict[str, Engine]:
        """Those of a group that have started, by method."""
        ready = {}
        for full, engine in list(self.engines.items()):
            if not full.startswith(f"{group}/"):
                continue
            try:
                facts = engine.wait(min(STARTING_S, max(self.results.left_s, 1.0)))
                self.results.add("engine", name=full, **facts)
                ready[full.split("/", 1)[1]] = engine
            except Failed as error:
                self.results.add("failed", what=f"start {full}", error=str(error)[-500:], log=engine.errors())
                self._end(full)
        return ready

    def _end(self, full: str) -> None:
        self.engines.pop(full).end()

    def end(self, group: str = "") -> None:
        """End engines."""
        for full in [name for name in self.engines if name.startswith(group)]:
            self._end(full)

    # Stages

    def machine(self) -> None:
        """What this is."""
        query = "name,memory.total,driver_version,clocks.max.sm"
        installed = {d.name: d.version for d in metadata.distributions()}
        self.results.add(
            "machine",
            gpu=_output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader") or "none",
            cores=os.cpu_count(),
            versions={
                name: installed.get(name) for name in ("torch", "triton", "vllm", "numba", "transformers")
            },
            commit=_output("git", "-C", str(ROOT), "rev-parse", "HEAD") or os.environ.get("COMMIT", ""),
            dry=self.dry,
        )

    def correctness(self, group: str) -> None:
        """Tokens and log-probabilities of our engines next to plain's."""
        ready = self.wait(group)
        if "plain" not in ready:
            raise Failed(f"{group}/plain did not start")
        for line in correctness.compared(ready, CORRECT[group].vocab_size, tokens=12 if self.dry else 80):
            self.results.add("correct", group=group, **line)

    def kernels(self) -> None:
        """Kernels replayed from CUDA graphs, in a process of their own."""
        command = [
            sys.executable,
            str(HERE / "graph_kernels.py"),
            "--seconds",
            str(min(35, self.results.left_s - 15)),
        ]
        process = subprocess.run(command, capture_output=True, text=True, timeout=90)
        for line in process.stdout.splitlines():
            if line.startswith("{"):
                self.results.add("kernel", **json.loads(line))
        if process.returncode:
            raise Failed(process.stderr[-2000:])

    def prepare(self, group: str) -> dict[str, Engine]:
        """Wait for a group's engines; let them say what was recorded."""
        ready = self.wait(group)
        return {name: engine for name, engine in ready.items() if self._plant(f"{group}/{name}", engine)}

    def _plant(self, name: str, engine: Engine) -> bool:
        try:
            engine.call("probe_plant", str(self.traces_path.resolve()))
            engine.call("probe_watch")
            self._warm(engine, 4)
            engine.call("probe_steps")
        except Failed as error:
            self.results.add("failed", what=f"prepare {name}", error=str(error)[-3000:])
            return False
        return True

    def _warm(self, engine: Engine, count: int = WARM_UP_TRACES) -> None:
        """Forget, then learn from traces that are not timed."""
        engine.call("probe_forget")
        count = min(count, self._num_warm)
        self._generate(engine, range(count), WARM_UP_TOKENS, count)

    @property
    def _num_warm(self) -> int:
        return min(WARM_UP_TRACES, len(self.traces.prompts) // 2)

    def _generate(self, engine: Engine, traces: Sequence[int], tokens: int, batch: int) -> dict[str, Any]:
        """Answer traces, so many at a time; what that took, and whether it was what was recorded."""
        total: dict[str, Any] = {"decode_s": 0.0, "wall_s": 0.0, "tokens": 0, "decode_tokens": 0, "wrong": 0}
        engine.call("probe_steps")
        for start in range(0, len(traces), batch):
            these = traces[start : start + batch]
            wanted = [self.traces.outputs[trace][:tokens] for trace in these]
            answer = engine.ask(
                "generate",
                texts=[self.traces.prompts[trace] for trace in these],
                params=[{"temperature": 0, "ignore_eos": True, "max_tokens": len(want)} for want in wanted],
            )
            total["decode_s"] += answer["decode_s"]
            total["wall_s"] += answer["wall_s"]
            total["tokens"] += sum(map(len, answer["tokens"]))
            total["decode_tokens"] += sum(len(got) - 1 for got in answer["tokens"])
            total["wrong"] += sum(got != want for got, want in zip(answer["tokens"], wanted, strict=True))
        steps = engine.call("probe_steps")
        requests = steps.get("decode_request_steps", 0)
        return {
            **total,
            "steps": steps,
            "planted": engine.call("probe_planted"),
            "tokens_per_step": total["decode_tokens"] / max(requests, 1),
            "tokens_per_s": total["decode_tokens"] / max(total["decode_s"], 1e-9),
            "step_ms": 1e3 * total["decode_s"] / max(steps.get("decode_steps", 0), 1),
        }

    def anatomy(self, group: str, ready: dict[str, Engine]) -> None:
        """What a step is made of: launches, what the device does, what it waits for."""
        for batch in [size for size in self.batches if size in (1, 64)]:
            for name in [name for name in ANATOMY if name in ready]:
                engine = ready[name]
                levels = engine.call("probe_level", None)
                for level in (
                    [max(each for each in levels if batch * (1 + each) <= 512), 0] if levels else [None]
                ):
                    engine.call("probe_level", level)
                    engine.call("probe_arm", 6, 3 if self.dry else 10)
                    first = self._num_warm
                    self._generate(engine, range(first, first + batch), 24 if level == 0 else 64, batch)
                    seen = engine.call("probe_profile")
                    self.results.add("anatomy", group=group, method=name, batch=batch, level=level, **seen)
                engine.call("probe_level", None)

    def costs(self, group: str, ready: dict[str, Engine]) -> None:
        """What a step takes, by batch size and level."""
        for batch in self.batches:
            traces = range(self._num_warm, self._num_warm + batch)
            if "plain" in ready:
                run = self._generate(ready["plain"], traces, 64, batch)
                self.results.add("cost", group=group, method="plain", batch=batch, level=None, **run)
            for name in (*OURS, HEAD):
                if name not in ready:
                    continue
                engine = ready[name]
                for level in engine.call("probe_level", None) if name != OURS[1] or batch in (1, 64) else ():
                    engine.call("probe_level", level)
                    engine.call("probe_forget")
                    run = self._generate(engine, traces, 64 if level == 0 or batch > 1 else 128, batch)
                    self.results.add("cost", group=group, method=name, batch=batch, level=level, **run)
                engine.call("probe_level", None)

    def end_to_end(self, group: str, ready: dict[str, Engine]) -> None:
        """Tokens a second of each method beside plain, in turns."""
        available = len(self.traces.prompts) - self._num_warm
        counts = {1: 6, 8: 16, 32: 64, 64: 64}
        tokens = len(self.traces.outputs[0])
        for batch in self.batches:  # the budget gets to know this size, before anything is timed
            for name in OURS:
                if name in ready:
                    self._warm(ready[name])
                    traces = range(self._num_warm, self._num_warm + max(batch, 2 if batch == 1 else 1))
                    self._generate(ready[name], traces, tokens, batch)
        for number in range(self.rounds):
            for batch in self.batches:
                traces = range(self._num_warm, self._num_warm + min(counts.get(batch, batch), available))
                names = [name for name in ready if name != HEAD]
                for name in names if number % 2 == 0 else names[::-1]:
                    if self.results.left_s < 20:
                        self.results.add("skipped", what=f"round {number}, batch {batch}, {name}")
                        continue
                    if name in OURS:
                        self._warm(ready[name])
                    run = self._generate(ready[name], traces, tokens, batch)
                    self.results.add("end_to_end", group=group, method=name, batch=batch, round=number, **run)
        for name in OURS:
            if name in ready:
                self.results.add("budget", group=group, method=name, seen=ready[name].call("probe_budget"))


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main() -> None:
    """Run all stages that fit into the time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="lines are added to it")
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu-suite"), help="shapes and logs")
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="of the run, the engines' start included"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 64]
    )
    parser.add_argument("--stages", default="correct,kernels,8b,smol")
    parser.add_argument("--dry", action="store_true", help="small, on a CPU, in Triton's interpreter")
    arguments = parser.parse_args()
    paths = [str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not arguments.dry:
        arguments.work.mkdir(parents=True, exist_ok=True)
        os.environ["GPU_SUITE_LOCK"] = str(arguments.work / "lock")
    stages = arguments.stages.split(",")
    suite = Suite(arguments)
    shapes = {name: SHAPES[name] for name in SHAPES if name in stages}
    if suite.dry and shapes:
        shapes = {"dry": DRY}
    try:
        if "correct" in stages:
            suite.start_correct()
        for group, shape in shapes.items():
            head = {"method": HEAD, "model": heads.eagle(shape, suite.work / f"{group}-{HEAD}")}
            suite.start(group, shape, {**METHODS, HEAD: head})
        suite.machine()
        if "correct" in stages:
            for group in CORRECT if not suite.dry else ["float32"]:
                suite.guarded(f"correctness, {group}", 30, suite.correctness, group)
                suite.end(f"{group}/")
        # Nothing starts while something is timed.
        prepared = {group: suite.prepare(group) for group in shapes}
        stages_of = (
            ("end to end", 40, suite.end_to_end),
            ("anatomy", 30, suite.anatomy),
            ("costs", 25, suite.costs),
        )
        for what, needs_s, stage in stages_of:
            for group, ready in prepared.items():
                suite.guarded(f"{what} {group}", needs_s, stage, group, ready)
        suite.end()
        if "kv" in stages:
            suite.guarded("kv", 90, kept_kv.run, suite)
        if "kernels" in stages and not suite.dry:
            suite.guarded("kernels", 30, suite.kernels)
    finally:
        suite.end()
    suite.results.add("done", left_s=round(suite.results.left_s))
    if suite.dry and suite.results.num_failed:
        sys.exit(f"{suite.results.num_failed} stages failed: see {arguments.out}")


if __name__ == "__main__":
    main()
