# SPDX-License-Identifier: Apache-2.0
"""Pack stock vLLM, and optionally the checkout and traces, for a GPU machine without a network.

    python scripts/gpu/pack.py --out .vbox [--traces traces.npz] [--checkout] [--arch 90] [--version 0.32.0]

The machine has Python 3.12, torch 2.11 for CUDA 13, triton, transformers and the usual scientific packages; what else
vLLM needs comes as wheels. vLLM's extensions use torch's stable ABI, so those built for a newer torch load. A fat
binary holds code for every GPU: the images that the named architecture never loads are zeroed, and compress to nothing
(79 MB become 14). `run.sh` unpacks it.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What vLLM 0.32 imports and the machine has not; pinned where a newer one does not go with the machine's others.
WHEELS = [
    "annotated_types",
    "apache_tvm_ffi",
    "cachetools",
    "cbor2",
    "compressed_tensors==0.17.0",
    "fastapi==0.136.3",
    "gguf",
    "httpcore2",
    "httpx2",
    "llguidance==1.7.6",
    "loguru",
    "msgspec",
    "openai",
    "oss_harmony==0.0.11",
    "partial_json_parser",
    "prometheus_fastapi_instrumentator",
    "pybase64",
    "pydantic==2.14.3",
    "pydantic_core==2.50.4",
    "pyzmq",
    "sniffio",
    "starlette",
    "truststore",
    "typing_inspection",
    "xgrammar==0.2.8",
]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
EXTENSIONS = "vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
MOST_BYTES = 8 << 20  # of one of vLLM's other files: larger ones are kernels for other models
HEADERS = (".h", ".hpp", ".cuh", ".inl")
FAT_BINARY = 0xBA55ED50
PTX, ELF = 1, 2

SETUP = '''"""Unpack into SITE (default: a folder in the temporary directory) and print that; once."""
import glob, lzma, os, subprocess, sys, tarfile, tempfile
here = os.path.dirname(os.path.abspath(__file__))
site = os.environ.get("SITE", os.path.join(tempfile.gettempdir(), "site"))
if not os.path.exists(site + "/vllm/.complete"):
    os.makedirs(site, exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run(command + ["--target", site] + sorted(glob.glob(here + "/whl/*.whl")), check=True)
    tarfile.open(here + "/vllm-py.tar.xz").extractall(site)
    for file in glob.glob(here + "/so/*.xz"):
        with open(os.path.join(site, os.path.basename(file)[:-3].replace("--", "/")), "wb") as out:
            out.write(lzma.open(file).read())
    open(site + "/vllm/.complete", "w").close()
print(site)
'''


def download(names: list[str], folder: Path) -> None:
    """Wheels of the machine's kind."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "-d", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run(command + names, check=True)


def thin(blob: bytearray, arch: int) -> None:
    """Zero the GPU images of an ELF file that a device of this architecture does not load; PTX only where it must.

    Source: NVIDIA's fat binary layout as cuobjdump shows it: regions of a header and images, each with kind,
    header size, length and architecture.
    """
    table = struct.unpack_from("<Q", blob, 0x28)[0]
    _, number, names_section = struct.unpack_from("<HHH", blob, 0x3A)

    def section(place: int) -> tuple[int, ...]:
        return struct.unpack_from("<IIQQQQ", blob, table + place * 64)

    names = section(names_section)[4]
    for place in range(number):
        name, _, _, _, offset, size = section(place)
        if bytes(blob[names + name : blob.index(0, names + name)]) != b".nv_fatbin":
            continue
        at, end = offset, offset + size
        while at + 16 <= end:
            magic, _, header, body = struct.unpack_from("<IHHQ", blob, at)
            if magic != FAT_BINARY:
                at += 8
                continue
            image, stop = at + header, at + header + body
            images = []
            while image < stop:
                kind, _, head, length = struct.unpack_from("<HHIQ", blob, image)
                images.append((kind, struct.unpack_from("<I", blob, image + 28)[0], image + head, length))
                image += head + length
            exact = any(kind == ELF and made_for == arch for kind, made_for, _, _ in images)
            for kind, made_for, start, length in images:
                loaded = (kind == ELF and made_for == arch) or (
                    kind == PTX and made_for <= arch and not exact
                )
                if not loaded:
                    blob[start : start + length] = bytes(length)
            at = stop


def pack_vllm(out: Path, arch: int, version: str) -> None:
    """vLLM's Python files, its extensions, and the wheels it needs."""
    (out / "so").mkdir(parents=True)
    download(WHEELS, out / "whl")
    with tempfile.TemporaryDirectory() as folder:
        download([f"vllm=={version}"], Path(folder))
        wheel = zipfile.ZipFile(next(Path(folder).iterdir()))
        with tarfile.open(out / "vllm-py.tar.xz", "w:xz") as tar:
            for item in wheel.infolist():
                name = item.filename
                if name in EXTENSIONS:
                    blob = bytearray(wheel.read(item))
                    thin(blob, arch)
                    with lzma.open(out / "so" / f"{name.replace('/', '--')}.xz", "wb") as file:
                        file.write(bytes(blob))
                    continue
                binary = name.endswith(".so") or ".so." in name
                headers = "cutlass" in name and name.endswith(HEADERS)
                if not (item.is_dir() or binary or headers or item.file_size > MOST_BYTES):
                    info = tarfile.TarInfo(name)
                    info.size = item.file_size
                    tar.addfile(info, wheel.open(item))
    (out / "setup.py").write_text(SETUP)


def main() -> None:
    """Pack, and print the sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder that is replaced")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times 10")
    parser.add_argument("--version", default="0.32.0")
    parser.add_argument("--traces", type=Path, help="what traces.py has recorded")
    parser.add_argument(
        "--checkout", action="store_true", help="the commit, where it does not get there another way"
    )
    arguments = parser.parse_args()
    out: Path = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    pack_vllm(out, arguments.arch, arguments.version)
    if arguments.traces is not None:
        shutil.copy(arguments.traces, out / "traces.npz")
    if arguments.checkout:
        command = [
            "git",
            "-C",
            str(ROOT),
            "archive",
            "--format=tar.gz",
            f"--output={(out / 'checkout.tar.gz').resolve()}",
        ]
        subprocess.run([*command, "HEAD", "--", ".", ":!docs/benchmarks"], check=True)
    sizes = {
        part.name: sum(
            file.stat().st_size for file in ([part] if part.is_file() else part.rglob("*")) if file.is_file()
        )
        for part in sorted(out.iterdir())
    }
    for name, size in sizes.items():
        print(f"{size / 2**20:6.1f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:6.1f} MiB  {out}")


if __name__ == "__main__":
    main()
