"""Makes the samples in this folder from the whole data: `ATLAS_DATA=… python atlas_lm/data/bundled/make.py`.

The licences of what is here stand in NOTICE.md.
"""

import io
import lzma
import tarfile
from pathlib import Path

from atlas_lm.data.babi import TASKS
from atlas_lm.data.library import catalogue, data_folder

HERE = Path(__file__).parent
ROWS = 20  # of each file of JSON lines
TEXTS = {  # what is kept of each archive of texts
    "books/test.tar.xz": ["test/10449.txt"],  # Burnham Breaker, by Homer Greene, 1887
    "books/validation.tar.xz": ["validation/10790.txt"],  # Prize Money, by W. W. Jacobs, 1909
    "books/train-0.tar.xz": [
        "train/10679.txt"
    ],  # The Story of the Other Wise Man, by H. van Dyke, 1895
    "essays/public_domain_essays.tar.xz": [
        "essays/henry-david-thoreau-civil-disobedience.txt",
        "essays/ralph-waldo-emerson-nature.txt",
    ],
}
BABI = "babi/tasks_1-20_v1-2_en.tar.xz"
ARTICLES = 3  # of WikiText
TAIL = 1 << 16  # bytes of enwik8, the last


def main() -> None:
    for item in catalogue().values():
        for file in item.files:
            whole = data_folder() / file.path
            if file.path in TEXTS:
                write(file.path, archive(whole, TEXTS[file.path]))
            elif file.path == BABI:
                write(file.path, archive(whole, babi_members()))
            elif file.path.endswith(".jsonl.xz"):
                write(file.path, unpacked(whole).splitlines(keepends=True)[:ROWS])
            elif file.path.endswith(".raw.xz"):
                write(file.path, articles(unpacked(whole)))
            elif item.name == "enwik8":
                write(file.path, [unpacked(whole)[-TAIL:]])
            elif file.path.endswith(".json"):
                write(file.path, [whole.read_bytes()])
    merges = (data_folder() / "tokenizer" / "gpt2" / "merges.txt").read_bytes()
    write("gpt2_merges.txt.xz", [merges])


def unpacked(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes())


def babi_members() -> list[str]:
    """The whole test files; of the training files the small ones, for the tasks with a story generator."""
    tests = [f"en-10k/{task}_{name}_test.txt" for task, name in TASKS.items()]
    train = [f"en/{task}_{name}_train.txt" for task, name in list(TASKS.items())[:5]]
    return [f"tasks_1-20_v1-2/{name}" for name in ["LICENSE.txt", *tests, *train]]


def archive(whole: Path, members: list[str]) -> list[bytes]:
    """A tar with these members alone, the same bytes each time it is made."""
    out = io.BytesIO()
    with tarfile.open(whole) as source, tarfile.open(fileobj=out, mode="w") as target:
        for name in members:
            file = source.extractfile(name)
            assert file is not None
            entry = tarfile.TarInfo(name)
            entry.size = source.getmember(name).size
            target.addfile(entry, file)
    return [out.getvalue()]


def articles(raw: bytes) -> list[bytes]:
    """The first articles; each begins with a line ` = Title = `."""
    lines = raw.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if is_title(line.decode().strip())]
    return lines[: starts[ARTICLES] - 1]


def is_title(line: str) -> bool:
    return line.startswith("= ") and line.endswith(" =") and not line.startswith("= =")


def write(path: str, parts: list[bytes]) -> None:
    target = HERE / path
    target.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(parts)
    target.write_bytes(
        lzma.compress(data, preset=9 | lzma.PRESET_EXTREME) if path.endswith(".xz") else data
    )
    print(f"{target.stat().st_size:>9,} {path}")


if __name__ == "__main__":
    main()
