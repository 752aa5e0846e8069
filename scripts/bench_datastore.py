# SPDX-License-Identifier: Apache-2.0
"""Time building a datastore and drafting from it.

    python scripts/bench_datastore.py --tokenizer MODEL [--tokens 20000000] [--inputs FOLDER] [--keep FOLDER]

The texts are Python files of FOLDER, by default this environment's site-packages. A tenth of them, taken at random
with a fixed seed, is held out; of the others as many make the store as have the tokens asked for, each file once. If
they have fewer, the store is smaller, and the line says so. The store is built by the command itself, in a process of
its own; its peak memory is the operating system's figure (VmHWM), which includes files it has mapped. Then a tenth is
added, and all is merged.

Drafts are made as while decoding: held-out files are walked from the front, each step proposes a tree of at most 16
nodes and goes on behind the part of it that the file follows. Timed is `Rest.propose` for one request, after `warm_up`.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from vllm_ext.data import model_files
from vllm_ext.proposers import datastore
from vllm_ext.proposers.base import Request, Sampling, VerifiedRows
from vllm_ext.proposers.datastore import Datastore
from vllm_ext.proposers.rest import Rest
from vllm_ext.proposers.tree import DraftTree, Int32

NODES = 16
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)


def command(*arguments: object) -> tuple[float, int]:
    """Run ``vllm-ext datastore``; its seconds and its peak memory in bytes."""
    script = """
import atexit, pathlib, sys
from vllm_ext.cli.main import main
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text(), file=sys.stderr))
main()
"""
    started = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-c", script, "datastore", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(process.stderr)
    peak = next(line for line in process.stderr.splitlines() if line.startswith("VmHWM"))
    return time.perf_counter() - started, int(peak.split()[1]) * 1024


def stage(folder: Path, files: list[Path], wanted_bytes: float) -> list[Path]:
    """Link files of about so many bytes into a new folder; returns those that are left."""
    folder.mkdir()
    size = 0
    for number, file in enumerate(files):
        if size >= wanted_bytes:
            return files[number:]
        (folder / f"{number}.py").symlink_to(file)
        size += file.stat().st_size
    return []


def follow(tree: DraftTree, tokens: list[int]) -> int:
    """How many of a tree's nodes the text takes, one below the other."""
    node, taken = -1, 0
    for child, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if parent == node and taken < len(tokens) and token == tokens[taken]:
            node, taken = child, taken + 1
    return taken


def draft(proposer: Rest, texts: list[Int32], steps: int) -> None:
    """Walk texts and print what drafting took and gave."""
    none = np.zeros(0, np.int32)
    starts, ids, logits = np.zeros(2, np.int32), none.reshape(0, 0), np.zeros((0, 0), np.float32)
    times: list[float] = []
    accepted: list[int] = []
    sizes: list[int] = []
    for tokens in texts:
        at = 32
        while at < len(tokens) and len(times) < steps:
            request = Request("r", tokens[:at], 32, NODES, NODES, GREEDY)
            started = time.perf_counter()
            [tree] = proposer.propose([request])
            times.append((time.perf_counter() - started) * 1e6)
            taken = follow(tree, tokens[at : at + NODES].tolist())
            emitted = tokens[at : at + taken + 1].tolist()
            proposer.observe(VerifiedRows(["r"], starts, none, none, none > 0, ids, logits, [emitted]))
            accepted.append(taken)
            sizes.append(len(tree))
            at += taken + 1
        proposer.finish("r")
    p50, p99 = np.percentile(times, [50, 99])
    print(
        f"drafts: {len(times)} of {np.mean(sizes):.1f} nodes, {np.mean(np.array(sizes) == 0):.0%} empty; "
        f"p50 {p50:.0f} us, p99 {p99:.0f} us, longest {max(times):.0f} us; "
        f"{np.mean(accepted) + 1:.2f} tokens a step on the held-out text"
    )


def main() -> None:
    """Build, append, merge, and draft before and after merging."""
    parser = argparse.ArgumentParser(description="Time vllm-ext datastore and the drafts of method rest.")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--inputs", type=Path, default=Path(np.__file__).parents[1])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--keep", type=Path, help="make the store here and leave it")
    args = parser.parse_args()
    files = sorted(path for path in args.inputs.rglob("*.py") if path.is_file() and path.stat().st_size)
    random.Random(0).shuffle(files)
    held_out, files = files[: len(files) // 10], files[len(files) // 10 :]
    tokenizer = model_files.load_tokenizer(args.tokenizer)

    def encode(paths: list[Path]) -> list[Int32]:
        texts = [path.read_text(errors="replace") for path in paths]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    sample = files[:300]
    bytes_per_token = sum(path.stat().st_size for path in sample) / sum(map(len, encode(sample)))
    print(f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores; {bytes_per_token:.2f} bytes a token")
    with tempfile.TemporaryDirectory() as scratch:
        store = args.keep or Path(scratch) / "store"
        files = stage(Path(scratch) / "first", files, args.tokens * bytes_per_token)
        stage(Path(scratch) / "second", files, args.tokens * bytes_per_token / 10)

        def report(what: str, seconds: float, peak: int) -> None:
            header = datastore.read_header(store)
            print(
                f"{what}: {seconds:.1f} s, peak {peak / 1e6:.0f} MB; {header.num_tokens} tokens in "
                f"{len(header.segments)} segments, {peak / header.num_tokens:.1f} bytes a token"
            )

        report(
            "build",
            *command("build", "--tokenizer", args.tokenizer, "--output", store, Path(scratch) / "first"),
        )
        started = time.perf_counter()
        datastore.verify(store)
        print(f"verify: {time.perf_counter() - started:.3f} s")
        texts = encode(held_out[:400])
        for merged in (False, True):
            if merged:
                report("append", *command("build", "--append", "--output", store, Path(scratch) / "second"))
                report("merge", *command("merge", store))
            started = time.perf_counter()
            proposer = Rest(Datastore.open(store))
            opened = time.perf_counter()
            proposer.warm_up()
            print(f"open: {(opened - started) * 1e3:.1f} ms, warm_up: {time.perf_counter() - opened:.2f} s")
            draft(proposer, texts, args.steps)


if __name__ == "__main__":
    main()
