# SPDX-License-Identifier: Apache-2.0
"""What a vLLM that we have not read changes under us: one command for a new release.

    python scripts/new_vllm.py 0.33.0 [--beside 0.32.0] [--write]

Downloads the wheel, unpacks its Python files and imports none of them; or takes a folder that has the folder ``vllm``.
Prints symbols and imports that are missing, and of each function that we override, call or imitate what has changed
since the vLLM that is installed, or --beside another. With --write the bodies count as read:
vllm_ext/compat/bodies.json has them. Exits with 1 if a symbol is missing or a body has not been read.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_ext.compat import bodies
from vllm_ext.compat.source_scan import Files
from vllm_ext.doctor.hooks import checks_of_files

READ = Path(bodies.__file__).with_suffix(".json")


def unpacked(given: str, into: Path) -> Path:
    """The folder of a version's Python files.

    Args:
        given: a version on the package index, or a folder that has them already.
        into: where a wheel goes.

    Raises:
        subprocess.CalledProcessError: pip has none.
    """
    if (Path(given) / "vllm").is_dir():
        return Path(given)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        f"vllm=={given}",
        "-d",
        str(into),
    ]
    subprocess.run(command, check=True)
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        kept = [name for name in archive.namelist() if name.endswith((".py", "METADATA"))]
        archive.extractall(into / given, kept)
    wheel.unlink()
    return into / given


def main() -> int:
    """Report; 1 if there is something to do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("vllm", help="version, or folder of unpacked files")
    parser.add_argument("--beside", help="version or folder; default: what is installed")
    parser.add_argument("--write", action="store_true", help="its bodies are read from now on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        new_folder = unpacked(options.vllm, work)
        old = Files.installed() if options.beside is None else Files(unpacked(options.beside, work))
        new = Files(new_folder)
        bad = [check for check in checks_of_files(new_folder) if check.status == "fail"]
        for check in bad:
            print(f"{check.what}: {check.found}")
        changed, unread = differences(old, new)
        if options.write:
            write(new)
            unread = 0
    print(f"\n{new.version()} beside {old.version()}: {changed} bodies changed, {unread} nobody has read")
    return 1 if bad or unread else 0


def differences(old: Files, new: Files) -> tuple[int, int]:
    """Print them; returns how many bodies have changed, and how many of all nobody has read."""
    before = {name: node for _, name, node in bodies.functions(old)}
    after = {name: node for _, name, node in bodies.functions(new)}
    unread = {body.name for body in bodies.bodies(new) if not body.read_in}
    changed = 0
    for name, node in after.items():
        was = before.get(name)
        if was is not None and bodies.digest(was) == bodies.digest(node):
            continue
        changed += 1
        print(f"\n== {name}{' (not read)' if name in unread else ''}")
        lines = [] if was is None else ast.unparse(was).splitlines()
        print("\n".join(difflib.unified_diff(lines, ast.unparse(node).splitlines(), lineterm="", n=2)))
    return changed, len(unread)


def write(files: Files) -> None:
    """Add the bodies of a vLLM to those that were read."""
    known = bodies.read()
    version = files.version().partition("+")[0]
    for body in bodies.bodies(files):
        known.setdefault(body.name, {})[version] = body.found
    READ.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
