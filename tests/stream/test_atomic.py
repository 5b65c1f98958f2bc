"""Saving is one step: whatever happens, the old file is there or the new one."""

import errno
import fcntl
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from atlas_lm.models import AtlasForCausalLM
from atlas_lm.stream.atomic import temporaries
from atlas_lm.stream.files import save_memory
from atlas_lm.stream.header import read_header
from tests.stream.readings import read


class TestSaving:
    @pytest.mark.parametrize("call", ["open", "fsync", "replace"])
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
    def test_a_failure_leaves_the_old_file(
        self,
        file: Path,
        model: AtlasForCausalLM,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        code: int,
    ) -> None:
        before = file.read_bytes()

        def broken(*args: object, **kwargs: object) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(f"atlas_lm.stream.atomic.os.{call}", broken)
        with pytest.raises(OSError, match=r"could not save .*the old file is untouched") as error:
            save_memory(file, model, read(model, 7))
        monkeypatch.undo()
        assert error.value.errno == code and error.value.filename == str(file)
        assert ("free some space" in str(error.value)) == (code == errno.ENOSPC)
        assert file.read_bytes() == before
        assert list(file.parent.iterdir()) == [file]

    def test_a_disk_that_fills_up_while_writing(self, file: Path, model: AtlasForCausalLM) -> None:
        """The system refuses in the middle of the file, here by a limit on the size of files."""
        before = file.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
        try:
            with pytest.raises(OSError, match="could not save") as error:
                save_memory(file, model, read(model, 7))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert error.value.errno == errno.EFBIG
        assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]

    def test_an_interruption_leaves_the_old_file(
        self, file: Path, model: AtlasForCausalLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = file.read_bytes()

        def interrupted(handle: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("atlas_lm.stream.atomic.os.fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_memory(file, model, read(model, 7))
        assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]

    def test_a_missing_folder(self, tmp_path: Path, model: AtlasForCausalLM) -> None:
        path = tmp_path / "none" / "a.mem"
        with pytest.raises(FileNotFoundError, match="the folder does not exist: make it first"):
            save_memory(path, model, read(model))

    def test_a_folder_in_its_place(self, tmp_path: Path, model: AtlasForCausalLM) -> None:
        with pytest.raises(IsADirectoryError, match="give the name of a file"):
            save_memory(tmp_path, model, read(model))

    def test_everything_is_durable_before_it_has_its_name(
        self, tmp_path: Path, model: AtlasForCausalLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls, path = [], tmp_path / "a.mem"
        for name in ("fsync", "replace"):
            real = getattr(os, name)
            monkeypatch.setattr(
                f"atlas_lm.stream.atomic.os.{name}",
                lambda *args, name=name, real=real: (
                    calls.append((name, path.exists())),
                    real(*args),
                ),
            )
        save_memory(path, model, read(model))
        assert calls == [("fsync", False), ("replace", False), ("fsync", True)]

    def test_links_and_permissions_are_kept(self, file: Path, model: AtlasForCausalLM) -> None:
        link = file.parent / "link.mem"
        link.symlink_to(file)
        file.chmod(0o600)
        save_memory(link, model, read(model, 7))
        assert link.is_symlink() and read_header(file).tokens == 7
        assert file.stat().st_mode & 0o777 == 0o600

    def test_what_dead_saves_left_is_removed(self, file: Path, model: AtlasForCausalLM) -> None:
        dead, living = (file.parent / f".a.mem.{name}.partial" for name in ("dead", "living"))
        other = file.parent / ".b.mem.dead.partial"
        for path in (dead, living, other):
            path.write_bytes(b"half of")
        assert temporaries(file) == [dead, living]
        with living.open("rb+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            save_memory(file, model, read(model))
        assert sorted(file.parent.iterdir()) == [living, other, file]


KILLED = """
import os, random, signal, sys, time, torch
from pathlib import Path
torch.set_num_threads(1)
from atlas_lm.stream.atomic import temporaries
from atlas_lm.stream.files import open_memory, save_memory
from tests.models.builders import small_model
from tests.stream.readings import assert_equal, read

path, model = Path(sys.argv[1]), small_model("mag", "titans")
readings = {tokens: read(model, tokens) for tokens in (24, 43)}
save_memory(path, model, readings[24])
chance, seen, halves = random.Random(0), set(), 0
for kill in range(30):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:  # a slow disk, so that most of the time is spent in the middle of a save
        sync = os.fsync
        os.fsync = lambda handle: (time.sleep(0.01), sync(handle))
    while child == 0:
        for reading in readings.values():
            save_memory(path, model, reading)
        os.write(tell, b"!")
    os.read(told, 1)
    time.sleep(chance.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    opened = open_memory(path, model)
    assert_equal(opened, readings[opened.tokens])
    seen.add(opened.tokens)
    left = len(temporaries(path))
    assert left <= 1, left  # the next save has removed those of the one before
    halves += left
save_memory(path, model, readings[24])
print(sorted(seen), halves, os.listdir(path.parent))
"""


def test_kill_9_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "a.mem")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen, halves, names = re.fullmatch(r"(\[.*?\]) (\d+) (.*)\n", done.stdout).groups()
    assert seen == "[24, 43]" and names == "['a.mem']"
    assert int(halves) >= 5, "the kills did not strike in the middle of a save"
