"""`atlas absorb`: whatever happens on the way, what was read is kept and can be gone on from."""

import json
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atlas_lm.cli.common import load_model
from atlas_lm.stream import Stream
from atlas_lm.stream.files import open_memory
from atlas_lm.text import ByteTokenizer
from tests.cli.builders import LINES, atlas, digest, make_model
from tests.stream.test_engine import assert_same

TEXT = LINES.encode()
COMMAND = [sys.executable, "-c", "from atlas_lm.cli.main import main; main()"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(scope="module")
def wanted(model: Path, tmp_path_factory) -> str:
    """What the memory of the whole text is."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "book.txt").write_bytes(TEXT)
    read(model, folder / "book.txt", folder / "memory")
    return digest(folder / "memory")


def read(model: Path, file: object, memory: Path, *options: object, stdin: bytes | None = None):
    arguments = ("absorb", model, file, "--memory", memory, *options)
    return atlas(*arguments, *(() if memory.exists() else ("--stride", 128)), stdin=stdin)


def tokens_of(memory: Path, model: Path) -> int:
    return open_memory(memory, load_model(model)).tokens


def test_a_file_becomes_a_memory(model: Path, book: Path, tmp_path: Path, wanted: str) -> None:
    result = read(model, book, tmp_path / "memory", "--json")
    record = json.loads(result.stdout)
    loaded = load_model(model)
    stream = Stream(loaded, stride=128)
    stream.absorb(list(TEXT))
    assert_same(open_memory(tmp_path / "memory", loaded), stream)
    assert record.pop("seconds") > 0
    assert record == {
        "memory": str(tmp_path / "memory"),
        "tokens_read": len(TEXT),
        "bytes_read": len(TEXT),
        "tokens": len(TEXT),
        "state_bytes": stream.bytes,
    }
    assert digest(tmp_path / "memory") == wanted


def test_pipes_parts_and_encodings_give_the_same(
    model: Path, tmp_path: Path, wanted: str, monkeypatch
) -> None:
    memory = tmp_path / "memory"
    result = read(model, "-", memory, stdin=TEXT[:1000])
    assert "read 1,000 tokens (1,000 bytes)" in result.stdout
    (tmp_path / "book").write_bytes(TEXT)
    monkeypatch.setattr("atlas_lm.text.pieces.BLOCK", 77)
    result = read(model, tmp_path / "book", memory, "--skip-bytes", 1000)
    assert f"holds {len(TEXT):,} tokens" in result.stdout
    assert digest(memory) == wanted
    (tmp_path / "old").write_bytes(LINES.encode("latin-1"))
    read(model, tmp_path / "old", tmp_path / "other", "--encoding", "latin-1")
    assert digest(tmp_path / "other") == wanted


def test_an_empty_text_is_read(model: Path, tmp_path: Path) -> None:
    result = read(model, "-", tmp_path / "memory", stdin=b"")
    assert result.exit_code == 0 and tokens_of(tmp_path / "memory", model) == 0


def test_saved_on_the_way(
    model: Path, book: Path, tmp_path: Path, monkeypatch, wanted: str
) -> None:
    from atlas_lm.stream import files

    saved, save = [], files.save_memory

    def count(path: Path, *rest: object) -> None:
        save(path, *rest)  # type: ignore[arg-type]
        saved.append(open_memory(path, load_model(model)).tokens)

    monkeypatch.setattr(files, "save_memory", count)
    read(model, book, tmp_path / "memory", "--every", 1000)
    assert len(saved) == len(TEXT) // 1000 + 1 and saved[-1] == len(TEXT)
    assert all(0 <= tokens - 1000 * (i + 1) < 100 * (i + 1) for i, tokens in enumerate(saved[:-1]))
    assert digest(tmp_path / "memory") == wanted


def interrupt_after(pieces: int, monkeypatch) -> None:
    encode, seen = ByteTokenizer.encode, []

    def interrupted(self: ByteTokenizer, text: str) -> list[int]:
        seen.append(text)
        if len(seen) > pieces:
            raise KeyboardInterrupt
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", interrupted)


@pytest.mark.parametrize("options", [[], ["--every", 500]])
def test_ctrl_c_says_how_to_go_on(
    model: Path, book: Path, tmp_path: Path, monkeypatch, wanted: str, options: list
) -> None:
    memory = tmp_path / "my memory"
    with monkeypatch.context() as patched:
        interrupt_after(20, patched)
        result = read(model, book, memory, *options)
    assert result.exit_code == 130
    read_bytes = len("".join(LINES.splitlines(keepends=True)[:20]).encode())
    assert (
        f"stopped; {memory} holds {read_bytes:,} tokens, up to byte {read_bytes}" in result.stderr
    )
    assert tokens_of(memory, model) == read_bytes
    command = shlex.split(result.stderr.partition("go on with: ")[2])
    assert command[:2] == ["atlas", "absorb"] and ("--every" in command) == bool(options)
    assert atlas(*command[1:]).exit_code == 0
    assert digest(memory) == wanted


def test_ctrl_c_before_the_first_piece(
    model: Path, book: Path, tmp_path: Path, monkeypatch
) -> None:
    interrupt_after(0, monkeypatch)
    result = read(model, book, tmp_path / "memory")
    assert result.exit_code == 130 and "nothing was read" in result.stderr
    assert not (tmp_path / "memory").exists()


def test_a_true_signal_while_a_pipe_waits(model: Path, tmp_path: Path, wanted: str) -> None:
    memory = tmp_path / "memory"
    arguments = ["absorb", model, "-", "--memory", memory, "--stride", "128", "--every", "1"]
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a suite that a script starts in the background has the signal ignored, and hands that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdin is not None
        lines = TEXT.splitlines(keepends=True)
        process.stdin.write(b"".join(lines[:10]))
        process.stdin.flush()
        give_up = time.monotonic() + 60
        while not memory.exists() and process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.05)
        process.stdin.write(b"".join(lines[10:13]) + lines[13][:9])
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    message = " ".join(stderr.decode().split())
    assert process.returncode == 130, message
    assert "go on with the bytes after it: atlas absorb" in message
    done = int(message.partition("up to byte ")[2].split()[0])
    assert 0 < done == tokens_of(memory, model)
    read(model, "-", memory, stdin=TEXT[done:])
    assert digest(memory) == wanted


def test_broken_text_keeps_what_came_before(model: Path, tmp_path: Path, wanted: str) -> None:
    lines, memory = TEXT.splitlines(keepends=True), tmp_path / "memory"
    good = b"".join(lines[:5])
    broken = tmp_path / "broken.txt"
    broken.write_bytes(good + b"Lin\xff 5\n" + b"".join(lines[6:]))
    result = read(model, broken, memory)
    assert result.exit_code == 2
    assert f"bytes ff at offset {len(good) + 3} are no utf-8" in result.stderr
    assert "--encoding latin-1" in result.stderr and f"--skip-bytes {len(good)}" in result.stderr
    assert tokens_of(memory, model) == len(good)
    broken.write_bytes(TEXT)
    read(model, broken, memory, "--skip-bytes", len(good))
    assert digest(memory) == wanted


def test_a_disk_without_room_is_refused_before_reading(
    model: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    result = read(model, book, tmp_path / "memory")
    assert result.exit_code == 2 and "1,000 bytes free" in result.stderr
    assert not (tmp_path / "memory").exists()


def test_a_full_disk_leaves_the_old_file(model: Path, book: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    read(model, "-", memory, stdin=b"Before.")
    before = digest(memory)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        result = read(model, book, memory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 1
    assert "atlas absorb: " in result.stderr and "old file is untouched" in result.stderr
    assert digest(memory) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["model", "nowhere.txt", "--memory", "memory"],
            "No such file or directory: 'nowhere.txt'",
        ),
        (["model", ".", "--memory", "memory"], "Is a directory"),
        (["nowhere", "-", "--memory", "memory"], "nowhere is missing"),
        (["model", "-", "--memory", "no/memory"], "the folder of memory no/memory does not exist"),
        (["model", "-", "--memory", "."], "is a folder, wanted a file"),
        (["model", "-", "--memory", "book.txt"], "book.txt"),
        (["model", "-", "--memory", "memory", "--encoding", "klingon"], "encoding is 'klingon'"),
        (["model", "-", "--memory", "memory", "--skip-bytes", "3"], "cannot be skipped"),
        (["model", "book.txt", "--memory", "memory", "--skip-bytes", "9999"], "cannot skip 9999"),
        (["model", "-", "--memory", "old", "--stride", "64"], "strides of 128"),
        (["model", "-", "--memory", "memory", "--device", "abacus"], "device 'abacus'"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(
    model: Path, book: Path, tmp_path: Path, monkeypatch, options: list, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    read(model, "-", tmp_path / "old", stdin=b"x")
    result = atlas("absorb", *options, stdin=b"text")
    assert result.exit_code == 2
    assert result.stderr.startswith("atlas absorb: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (tmp_path / "memory").exists()
