"""Memory files: what was saved comes back bit by bit, and nothing else is ever taken for it."""

import re
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from atlas_lm.models import AtlasForCausalLM
from atlas_lm.stream.engine import Stream
from atlas_lm.stream.files import copy_memory, open_memory, read_memory, save_memory
from atlas_lm.stream.header import MemoryFileError, read_head, read_header
from atlas_lm.stream.reading import Reading
from tests.models.builders import random_ids, small_model
from tests.stream.mutants import join, mutants, sign, split
from tests.stream.readings import KINDS, STRIDE, TOKENS, assert_equal, read, tensors

DOCS = Path(__file__).parents[2] / "docs" / "memory-files.md"


@pytest.mark.parametrize(("block", "rule"), KINDS, ids=str)
def test_what_was_saved_is_opened_again(tmp_path: Path, block: str, rule: str) -> None:
    model, path = small_model(block, rule), tmp_path / "a.mem"
    for tokens in (0, 5, STRIDE, TOKENS):
        reading = read(model, tokens)
        save_memory(path, model, reading)
        assert_equal(open_memory(path, model), reading)
        assert read_header(path).tokens == tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model, path = small_model("mag", "titans").to(dtype), tmp_path / "a.mem"
    for bits in (None, 8, 4):
        save_memory(path, model, read(model), bits)
        opened = open_memory(path, model)
        save_memory(path, model, opened, bits)
        assert_equal(open_memory(path, model), opened)
        assert f"torch.{read_header(path).dtype}" == str(dtype)
    with pytest.raises(
        MemoryFileError, match=r"written by a model in '\w+', this one is in float32"
    ):
        open_memory(path, small_model("mag", "titans"))


def test_numbers_of_all_kinds_survive(tmp_path: Path, model: AtlasForCausalLM) -> None:
    reading, path = read(model), tmp_path / "a.mem"
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42, -float("inf")])
    weight = reading.state.leaves()["layers.0.memory.memory.w0"]
    weight.view(-1)[: len(odd)] = odd
    save_memory(path, model, reading)
    assert_equal(open_memory(path, model), reading)


def test_the_same_memory_gives_the_same_bytes(tmp_path: Path, model: AtlasForCausalLM) -> None:
    first, second = tmp_path / "a.mem", tmp_path / "b.mem"
    save_memory(first, model, read(model))
    save_memory(second, model, open_memory(first, model))
    assert first.read_bytes() == second.read_bytes()


def test_it_is_a_safetensors_file(file: Path, model: AtlasForCausalLM) -> None:
    wanted = tensors(read(model))
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == set(wanted)
        assert all(torch.equal(opened.get_tensor(name), wanted[name]) for name in wanted)
        assert opened.metadata()["format"] == "atlas-memory"


def test_the_checksum_is_as_documented(tmp_path: Path, model: AtlasForCausalLM) -> None:
    page: dict[str, Any] = {}
    exec(re.findall(r"```python\n(import hashlib.*?)```", DOCS.read_text(), re.DOTALL)[0], page)
    for bits in (None, 8, 4):
        save_memory(tmp_path / "a.mem", model, read(model), bits)
        assert page["checksum"](tmp_path / "a.mem") == read_header(tmp_path / "a.mem").checksum


def test_tests_named_in_the_documentation_exist() -> None:
    folder = Path(__file__).parent
    text = "".join(
        (folder / f"test_{name}.py").read_text() for name in ("files", "atomic", "quantize")
    )
    named = set(re.findall(r"(?:test_\w+|Test\w+)(?=[`,])", DOCS.read_text()))
    assert len(named) == 10
    assert all(f"def {name}(" in text or f"class {name}:" in text for name in named)


def test_opened_tensors_have_memory_of_their_own(file: Path, model: AtlasForCausalLM) -> None:
    leaves = open_memory(file, model).state.leaves().values()
    places = [leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.numel()]
    assert len(set(places)) == len(places)
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in leaves)


ELSEWHERE = """
import sys, torch
torch.set_num_threads(1)
from atlas_lm.cli.common import load_model
from atlas_lm.stream.engine import Stream
from atlas_lm.stream.files import open_memory, save_memory
for folder in sys.argv[1:]:
    model = load_model(folder)
    stream = Stream(model, reading=open_memory(f"{folder}/a.mem", model))
    stream.absorb(torch.load(f"{folder}/b.pt"))
    save_memory(f"{folder}/ab.mem", model, stream.reading)
"""


def test_a_stream_goes_on_in_another_process_bit_by_bit(tmp_path: Path) -> None:
    whole, folders = {}, []
    for i, (block, rule) in enumerate(KINDS):
        folder, model = tmp_path / str(i), small_model(block, rule)
        model.save_pretrained(folder)
        a, b = random_ids(1, TOKENS)[0], random_ids(1, 2 * TOKENS, seed=5)[0]
        stream = Stream(model, stride=STRIDE)
        stream.absorb(a)
        save_memory(folder / "a.mem", model, stream.reading)
        torch.save(b, folder / "b.pt")
        stream.absorb(b)
        save_memory(folder / "whole.mem", model, stream.reading)
        whole[folder] = (folder / "whole.mem").read_bytes()
        folders.append(str(folder))
    subprocess.run([sys.executable, "-c", ELSEWHERE, *folders], check=True, capture_output=True)
    for folder, wanted in whole.items():
        assert (folder / "ab.mem").read_bytes() == wanted


class TestAnotherModel:
    def test_a_field_of_the_rule(self, file: Path, model: AtlasForCausalLM) -> None:
        spec = model.config.spec
        assert spec is not None
        other = small_model("mag", "titans", memory=spec.replace(chunk=2 * spec.timing.chunk))
        wanted = f"memory.timing.chunk is {spec.timing.chunk} in the file and {2 * spec.timing.chunk} here"
        with pytest.raises(MemoryFileError, match=re.escape(wanted)):
            open_memory(file, other)

    def test_a_field_of_the_configuration(self, file: Path) -> None:
        wanted = "sliding_window is 7 in the file and 9 here"
        with pytest.raises(MemoryFileError, match=wanted):
            open_memory(file, small_model("mag", "titans", sliding_window=9))

    def test_many_fields(self, file: Path) -> None:
        with pytest.raises(MemoryFileError, match=r"blocks is \['mag', 'mag'\].*and \d+ more"):
            open_memory(file, small_model("lmm", "atlas"))

    def test_other_weights(self, file: Path) -> None:
        other = small_model("mag", "titans", seed=1)
        with pytest.raises(MemoryFileError, match="same configuration with other weights") as error:
            open_memory(file, other)
        assert read_header(file).model_fingerprint in str(error.value)

    def test_weights_that_changed_since(self, tmp_path: Path) -> None:
        model, path = small_model("mag", "titans"), tmp_path / "a.mem"
        save_memory(path, model, read(model))
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1
        with pytest.raises(MemoryFileError, match="other weights"):
            open_memory(path, model)

    def test_its_header_can_be_read_without_it(self, file: Path, model: AtlasForCausalLM) -> None:
        header, seen = read_header(file), read_memory(file)
        assert (header.tokens, header.stride, header.dtype, header.bits) == (43, 8, "float32", None)
        spec = model.config.spec
        assert spec is not None and header.specs == {spec.fingerprint: spec.to_dict()}
        assert header.layers == (spec.fingerprint, spec.fingerprint)
        assert seen.size == file.stat().st_size and len(seen.pending) == 3
        leaves = read(model).state.leaves()
        assert all(torch.equal(seen.leaves[name], leaves[name]) for name in leaves)


class TestReadingsThatAreRefused:
    def test_of_another_model(self, tmp_path: Path, model: AtlasForCausalLM) -> None:
        with pytest.raises(ValueError, match=r"cannot be saved with this model: lacks the tensors"):
            save_memory(tmp_path / "a.mem", model, read(small_model("lmm", "atlas")))
        assert not list(tmp_path.iterdir())

    def test_of_two_rows(self, tmp_path: Path, model: AtlasForCausalLM) -> None:
        reading = read(model)
        twice = Reading(
            state=reading.state.rows(torch.tensor([0, 0])), pending=reading.pending, stride=STRIDE
        )
        with pytest.raises(ValueError, match="has 2 streams, wanted one"):
            save_memory(tmp_path / "a.mem", model, twice)

    def test_between_two_borders(self, tmp_path: Path, model: AtlasForCausalLM) -> None:
        reading = read(model)
        for stride, pending in ((7, reading.pending), (8, torch.zeros(9, dtype=torch.int64))):
            wrong = Reading(state=reading.state, pending=pending, stride=stride)
            with pytest.raises(ValueError, match="of them pending, wanted 1"):
                save_memory(tmp_path / "a.mem", model, wrong)

    def test_pending_ids_of_another_type(self, tmp_path: Path, model: AtlasForCausalLM) -> None:
        wrong = Reading(state=read(model).state, pending=torch.ones(3), stride=STRIDE)
        with pytest.raises(ValueError, match=r"pending is float32 \[3\], wanted int64 \[n\]"):
            save_memory(tmp_path / "a.mem", model, wrong)

    def test_ids_that_the_model_does_not_have(
        self, tmp_path: Path, model: AtlasForCausalLM
    ) -> None:
        wrong = Reading(state=read(model).state, pending=torch.tensor([40]), stride=STRIDE)
        with pytest.raises(ValueError, match="a pending token has id 40, wanted 0 to 39"):
            save_memory(tmp_path / "a.mem", model, wrong)


@contextmanager
def little_memory(room: int) -> Iterator[None]:
    """Whoever asks for more address space than there is in use now plus `room` gets an error."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def python_memory(most: int) -> Iterator[None]:
    """What Python itself allocates inside, at its peak, is at most so much."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= most
    finally:
        tracemalloc.stop()


def test_two_thousand_damaged_files(tmp_path: Path, model: AtlasForCausalLM) -> None:
    """Each is refused with MemoryFileError, or holds the very same memory. None is given more room than a
    few times its own size, whatever sizes it claims."""
    files, honest, path = [], [], tmp_path / "a.mem"
    for bits in (None, 8, 4):
        save_memory(path, model, read(model), bits)
        files.append(path.read_bytes())
        honest.append((metadata(path), open_memory(path, model)))
    refused = 0
    with little_memory(room=64 * 2**20):
        for i, (what, raw) in enumerate(mutants(files, 2_000, seed=0)):
            path.write_bytes(raw)
            # tracing is slow, so every tenth is traced; 13 kinds of damage take turns
            with python_memory(20 * max(len(raw), 8192)) if i % 10 == 0 else nullcontext():
                found = opened_or_refused(path, model)
            if isinstance(found, str):
                assert found.startswith(f"{path}: ") and len(found) < 1_000, what
                refused += 1
            else:
                same = [reading for known, reading in honest if known == metadata(path)]
                assert len(same) == 1, what
                assert_equal(found, same[0])
    assert 1_900 < refused < 2_000


def opened_or_refused(path: Path, model: AtlasForCausalLM) -> Reading | str:
    try:
        return open_memory(path, model)
    except MemoryFileError as error:
        return str(error)


def metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        return read_head(file).metadata


def test_the_guards_of_the_test_above_bite() -> None:
    with little_memory(room=64 * 2**20), pytest.raises((MemoryError, RuntimeError)):
        torch.empty(2**34, dtype=torch.uint8)  # more than an allocator may have put by
    with pytest.raises(AssertionError), python_memory(2**20):
        bytes(2**21)


class TestForgeries:
    """Files with a fitting checksum that contradict themselves or the model."""

    def test_one_clock_is_ahead(self, file: Path, model: AtlasForCausalLM) -> None:
        record, data = split(file.read_bytes())
        begin = record["layers.1.memory.position"]["data_offsets"][0]
        data = data[:begin] + (43).to_bytes(8, "little") + data[begin + 8 :]
        file.write_bytes(join(sign(record, data), data))
        wanted = r"layers.1.memory.position is 43, wanted 42 like the rest"
        with pytest.raises(MemoryFileError, match=wanted):  # 40 tokens after 2 persistent ones
            open_memory(file, model)

    def test_a_tail_that_did_not_grow_with_the_stream(self, tmp_path: Path) -> None:
        model, path = small_model("attention", "attention"), tmp_path / "a.mem"
        save_memory(path, model, read(model))
        record, data = split(path.read_bytes())
        record["__metadata__"]["tokens"] = str(TOKENS + STRIDE)
        path.write_bytes(join(sign(record, data), data))
        with pytest.raises(
            MemoryFileError, match=r"\[1, 40, 2, 8\], wanted float32 \[1, 48, 2, 8\]"
        ):
            open_memory(path, model)

    @pytest.mark.parametrize(
        ("name", "value", "told"),
        [
            ("atlas_lm_version", "0.1\x1b[2J", "metadata atlas_lm_version is"),  # clears a terminal
            ("tokens", "٤٣", "metadata tokens is"),
            ("stride", "0", "metadata stride is '0'"),
            ("config", '{"a":' * 20 + "1" + "}" * 20, "nested more than 16 deep"),
            ("config", "[" * 10**5, "config is (no proper JSON|nested too deeply)"),
            ("config", '{"a": 1, "a": 2}', "a name stands twice"),
            ("quantization", '{"bits": true, "tensors": {}}', "wanted bits 8 or 4"),
        ],
    )
    def test_metadata_is_refused_without_a_model_too(
        self, file: Path, name: str, value: str, told: str
    ) -> None:
        record, data = split(file.read_bytes())
        record["__metadata__"][name] = value
        file.write_bytes(join(sign(record, data), data))
        for look in (read_header, read_memory):
            with pytest.raises(MemoryFileError, match=told):
                look(file)

    def test_another_version(self, file: Path, model: AtlasForCausalLM) -> None:
        record, data = split(file.read_bytes())
        record["__metadata__"]["format_version"] = "2"
        file.write_bytes(join(sign(record, data), data))
        with pytest.raises(
            MemoryFileError, match=r"format version '2', .* reads 1; update atlas-lm"
        ):
            open_memory(file, model)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path, model: AtlasForCausalLM) -> None:
    for path in (tmp_path / "none.mem", tmp_path):
        with pytest.raises(MemoryFileError, match=r"cannot be read .* check the path"):
            open_memory(path, model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_memory_moves_between_devices(tmp_path: Path) -> None:
    near, far, path = (
        small_model("mag", "titans"),
        small_model("mag", "titans").cuda(),
        tmp_path / "a",
    )
    reading = read(far)
    save_memory(path, far, reading)
    again = open_memory(path, far)
    assert all(leaf.is_cuda for leaf in again.state.leaves().values())
    here = Reading(state=reading.state.to("cpu"), pending=reading.pending, stride=STRIDE)
    assert_equal(open_memory(path, near), here)
    assert_equal(Reading(state=again.state.to("cpu"), pending=again.pending, stride=STRIDE), here)


class TestCopies:
    def test_a_copy_is_the_same_file(self, file: Path) -> None:
        copy = file.parent / "b.mem"
        copy_memory(file, copy)
        assert copy.read_bytes() == file.read_bytes()

    def test_nothing_is_overwritten_unasked(self, file: Path, model: AtlasForCausalLM) -> None:
        copy = file.parent / "b.mem"
        save_memory(copy, model, read(model, 7))
        with pytest.raises(FileExistsError, match="exists already"):
            copy_memory(file, copy)
        assert read_header(copy).tokens == 7
        copy_memory(file, copy, overwrite=True)
        assert read_header(copy).tokens == TOKENS

    def test_a_damaged_file_is_not_copied(self, file: Path) -> None:
        raw = file.read_bytes()
        file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(MemoryFileError, match="it was changed after it was saved"):
            copy_memory(file, file.parent / "b.mem")
        assert list(file.parent.iterdir()) == [file]
