# SPDX-License-Identifier: Apache-2.0
"""The file of what was learnt: complete or absent, another's or damaged set aside; and who saves it when."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from vllm_ext.config import speculative
from vllm_ext.engine.state import state_file
from vllm_ext.engine.state.state_file import Identity, Keeper, StateError, StateFile
from vllm_ext.kernels.learned_arrays import Learned

MINE = Identity("org/model", "", "abc", 100, "token_recycling", '{"matrix_width": 2}', 0)


def arrays(seed: int = 0) -> dict[str, Learned]:
    random = np.random.default_rng(seed)
    return {
        "ids": random.integers(-1, 99, (40, 3)).astype(np.int32),
        "flags": random.integers(0, 2, 50).astype(np.bool_),
        "keys": random.integers(-(2**62), 2**62, 20),
        "counts": random.random((2, 3, 4)),
        "bytes": random.integers(0, 256, 7).astype(np.uint8),
        "nothing": np.empty((0, 4), np.int64),
    }


def same(one: dict[str, Learned] | None, other: dict[str, Learned]) -> bool:
    return (
        one is not None
        and one.keys() == other.keys()
        and all(
            one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
        )
    )


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    return StateFile(tmp_path, MINE)


def test_what_is_saved_is_loaded(file: StateFile) -> None:
    assert file.load() is None
    for seed in range(2):
        file.save(arrays(seed))
        assert same(file.load(), arrays(seed))
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Identity)])
def test_every_combination_has_its_own_file(file: StateFile, field: str) -> None:
    value = getattr(MINE, field)
    changes: dict[str, Any] = {field: value + 1 if isinstance(value, int) else value + "x"}
    other = dataclasses.replace(MINE, **changes)
    theirs = StateFile(file.path.parent, other)
    assert theirs.path != file.path
    theirs.save(arrays(1))
    file.save(arrays(2))
    assert same(theirs.load(), arrays(1))
    theirs.path.rename(file.path)  # copied from elsewhere
    with pytest.raises(StateError, match=f"it was saved with {field}="):
        file.load()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> StateFile:
    file = StateFile(tmp_path_factory.mktemp("saved"), MINE)
    file.save(arrays())
    return file


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damaged_byte_and_no_truncation_goes_unseen(
    saved: StateFile, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(saved.path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    # The header's length, the header, and the arrays.
    first, last = data.draw(st.sampled_from([(0, 8), (8, header), (header, len(content))]))
    at = data.draw(st.integers(first, last - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        del content[at:]
    damaged = StateFile(tmp_path, MINE)
    damaged.path.write_bytes(content)
    try:
        loaded = damaged.load()
    except StateError:
        return
    # White space, or the order of names, may change in a header that still says the same.
    assert first == 8
    assert same(loaded, arrays())


def with_metadata(file: StateFile, **changes: str) -> None:
    """The file with other metadata and the checksum that fits it."""
    content = arrays()
    metadata = {**file._metadata(), **changes}
    metadata.setdefault("checksum", state_file._checksum(metadata, content))
    save_file(content, file.path, metadata)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "pt"}, "no state of vllm-ext"),
        ({"version": "2"}, "its format has version 2, this vllm-ext reads version 1"),
        ({"tokenizer": "other"}, "saved with tokenizer='other', this server has 'abc'"),
        ({"vocab_size": "101"}, "saved with vocab_size='101', this server has '100'"),
        ({"checksum": "0" * 64}, "damaged: its checksum"),
    ],
)
def test_what_cannot_be_used_is_said(file: StateFile, changes: dict[str, str], says: str) -> None:
    with_metadata(file, vllm_ext="0.0.1")  # another release's is fine
    assert same(file.load(), arrays())
    with_metadata(file, **changes)
    with pytest.raises(StateError, match=says):
        file.load()


def test_the_checksum_covers_the_metadata(file: StateFile) -> None:
    checksum = state_file._checksum(file._metadata(), arrays())
    with_metadata(file, checksum=checksum)
    assert same(file.load(), arrays())
    with_metadata(file, checksum=checksum, vllm_ext="0.0.1")
    with pytest.raises(StateError, match="its checksum does not fit"):
        file.load()


def test_files_that_are_none(file: StateFile) -> None:
    for content in (b"", b"\0" * 100, b"x" * 7, b"\xff" * 64):
        file.path.write_bytes(content)
        with pytest.raises(StateError, match="it cannot be read"):
            file.load()
    save_file(arrays(), file.path)
    with pytest.raises(StateError, match="no state of vllm-ext"):
        file.load()
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(StateError, match="it is no file"):
        file.load()
    file.path.rmdir()
    os.mkfifo(file.path)  # whoever opens it waits for a writer
    with pytest.raises(StateError, match="it is no file"):
        file.load()
    file.path.unlink()
    with file.path.open("wb") as sparse:
        sparse.truncate(state_file._memory_bytes())
    with pytest.raises(StateError, match=r"it has \d+ bytes, more than half of this machine's memory"):
        file.load()


def test_set_aside_is_renamed_with_a_warning(file: StateFile, caplog: pytest.LogCaptureFixture) -> None:
    file.path.write_bytes(b"precious")
    with caplog.at_level(logging.WARNING, "vllm.vllm_ext"):
        file.set_aside("it is bad")
        file.set_aside("it is bad")  # gone: another server was faster
    assert file.load() is None
    (aside,) = file.path.parent.iterdir()
    assert aside.read_bytes() == b"precious"
    assert aside.name.startswith(f"{file.path.name}.set-aside-")
    assert f"{file.path} cannot be used: it is bad" in caplog.text
    assert aside.name in caplog.text


def test_what_killed_saves_left_is_removed_when_old(file: StateFile) -> None:
    folder = file.path.parent
    old, new = folder / f".{file.path.name}.1.tmp", folder / f".{file.path.name}.2.tmp"
    others = folder / ".other.safetensors.1.tmp"
    for path in (old, new, others):
        path.touch()
    for path in (old, others):
        os.utime(path, (time.time() - 2 * state_file.ABANDONED_SECONDS,) * 2)
    file.load()
    assert [path.exists() for path in (old, new, others)] == [False, True, True]


KILLED = """
import sys, numpy as np
from pathlib import Path
from vllm_ext.engine.state.state_file import Identity, StateFile
file = StateFile(Path(sys.argv[1]), Identity("org/model", "", "abc", 100, "token_recycling", "", 0))
number = 0
while True:
    file.save({name: np.full(1 << 18, number, np.int64) for name in "ab"})
    if number == 0:
        print("saved", flush=True)
    number += 1
"""


def test_kill_9_leaves_one_complete_file(tmp_path: Path) -> None:
    """Killed at random moments of back-to-back saves, several times over the same file."""
    file = StateFile(tmp_path, dataclasses.replace(MINE, options=""))
    random = np.random.default_rng(0)
    last = 0
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"saved\n"
            time.sleep(0.02 + 0.1 * random.random())
            process.send_signal(signal.SIGKILL)
        loaded = file.load()
        assert loaded is not None
        (number,) = np.unique(np.concatenate(list(loaded.values())))
        last = max(last, int(number))
    assert last > 0  # not always the first save


def test_two_that_save_at_once_leave_one_of_both(file: StateFile) -> None:
    others = [StateFile(file.path.parent, MINE) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda other=other, seed=seed: [other.save(arrays(seed)) for _ in range(30)])
        for seed, other in enumerate(others)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (loaded := file.load()) is not None:
            assert same(loaded, arrays(0)) or same(loaded, arrays(1))
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(file: StateFile, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file.save(arrays(0))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space"):
            file.save(arrays(1))
    assert same(file.load(), arrays(0))
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_the_librarys_own_failure_is_an_os_error(file: StateFile) -> None:
    """A file-size limit stands for the full disk: the write itself fails, inside the library."""
    script = f"""
import resource, signal
from test_state_file import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = StateFile(Path({str(file.path.parent)!r}), MINE)
file.save(arrays(0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    file.save(arrays(1))
except OSError as error:
    print("OSError", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OSError" in done.stdout
    assert same(file.load(), arrays(0))
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


class Kept:
    """A keeper, what it saves, and what it counts."""

    def __init__(self, file: StateFile, seconds: float = 3600.0) -> None:
        self.lock = threading.Lock()
        self.content = arrays(0)
        self.counted: list[str] = []
        self.keeper = Keeper(file, self.state_dict, self.lock, seconds, self.counted.append)

    def state_dict(self) -> dict[str, Learned]:
        assert self.lock.locked()
        return self.content

    def learn(self, seed: int) -> None:
        with self.lock:
            self.content = arrays(seed)
            self.keeper.mark_dirty()


def test_only_what_is_new_is_saved_and_the_end_always(file: StateFile) -> None:
    kept = Kept(file)
    assert not kept.keeper.save()
    kept.learn(1)
    assert kept.keeper.save()
    assert not kept.keeper.save()
    kept.learn(2)
    kept.keeper.close()
    kept.keeper.close()
    assert same(file.load(), arrays(2))
    assert kept.counted == ["state_saves"] * 2


def test_it_is_saved_at_intervals_without_a_step(file: StateFile) -> None:
    """An idle server too loses no more than the last interval."""
    kept = Kept(file, 0.05)
    kept.learn(1)
    deadline = time.monotonic() + 20
    while not kept.counted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert same(file.load(), arrays(1))
    time.sleep(0.2)
    assert kept.counted == ["state_saves"]  # nothing new
    kept.keeper.close()
    assert not kept.keeper._thread.is_alive()


def test_learning_goes_on_while_it_is_written(file: StateFile, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(file)
    writing, go_on = threading.Event(), threading.Event()
    save = StateFile.save

    def slow(self: StateFile, content: Any) -> None:
        writing.set()
        assert go_on.wait(20)
        save(self, content)

    monkeypatch.setattr(StateFile, "save", slow)
    kept.learn(1)
    thread = threading.Thread(target=kept.keeper.save)
    thread.start()
    assert writing.wait(20)
    kept.learn(2)  # would hang if the lock were held
    closing = threading.Thread(target=kept.keeper.close)
    closing.start()
    time.sleep(0.05)
    assert kept.counted == []  # the second waits for the first
    go_on.set()
    closing.join(20)
    thread.join(20)
    assert same(file.load(), arrays(2))
    assert kept.counted == ["state_saves"] * 2


def test_failures_are_counted_logged_once_a_cause_and_tried_again(
    file: StateFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(file)
    kept.learn(1)
    with caplog.at_level(logging.WARNING, "vllm.vllm_ext"):
        for code in (errno.ENOSPC, errno.ENOSPC, errno.EIO):

            def fail(*_: Any, code: int = code) -> None:
                raise OSError(code, os.strerror(code))

            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", fail)
                assert not kept.keeper.save()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "No space left on device" in caplog.text
    assert str(file.path) in caplog.text
    assert kept.counted == ["state_save_errors"] * 3
    kept.keeper.close()  # nothing learnt since, and yet not saved
    assert same(file.load(), arrays(1))


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = state_file.prepare_folder("a/b")
    assert folder == tmp_path / "a" / "b"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)
    assert state_file.prepare_folder(str(folder)) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755  # the user's own choice


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(
            ValueError, match=rf"state_dir='{tmp_path}/{name}': nothing can be written.*remove"
        ):
            state_file.prepare_folder(str(tmp_path / name))

    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    with pytest.raises(ValueError, match=r"nothing can be written there \(Permission denied\)"):
        state_file.prepare_folder(str(tmp_path))


def identity(model_dir: str, **options: Any) -> Identity:
    model = SimpleNamespace(
        model=model_dir,
        revision=None,
        tokenizer=model_dir,
        tokenizer_revision=None,
        get_vocab_size=lambda: 49152,
    )
    parallel = SimpleNamespace(data_parallel_index=0)
    settings = speculative.parse({"method": "token_recycling", **options})
    vllm_config = SimpleNamespace(model_config=model, parallel_config=parallel)
    return Identity.of(vllm_config, settings.method, settings.own_options)


def test_whose_state_it_is(model_dir: str, tmp_path: Path) -> None:
    one = identity(model_dir)
    assert one.model == str(Path(model_dir).resolve())
    assert len(one.tokenizer) == 64
    # What shapes nothing may change from one start to the next; the method's own options may not.
    other = identity(
        model_dir, num_speculative_tokens=3, budget="fixed", state_dir="x", state_interval_minutes=1
    )
    assert other == one
    assert identity(model_dir, matrix_width=3).file_name != one.file_name
    (tmp_path / "tokenizer.json").write_text("{}")  # no fast tokenizer: known by name
    assert identity(str(tmp_path)).tokenizer == f"{tmp_path}@"


def test_the_metadata_is_there_for_people_too(file: StateFile) -> None:
    file.save(arrays())
    with safe_open(file.path, framework="numpy") as opened:
        metadata = opened.metadata()
    assert metadata.items() > {"format": "vllm-ext state", "model": "org/model", "vocab_size": "100"}.items()
    assert file.path.name.startswith("token_recycling-model-")
