"""At how many tokens each head of a model writes: in books, and in rows of stories hidden in books:
`python benchmarks/gates.py --model atlas_lm/pretrained/babilong`.

Validation books and validation stories; a smooth gate is open everywhere.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from atlas_lm.data.lessons import BABILongLesson
from atlas_lm.data.sentences import book_sentences
from atlas_lm.models import AtlasForCausalLM
from atlas_lm.text import load_tokenizer

ROW = 1024  # tokens of a row of a book
FIRST = (
    100_000  # the first token of the books that is read, or their beginning where they are short
)


@torch.no_grad()
def open_shares(model: AtlasForCausalLM, rows: Sequence[Tensor]) -> list[list[float]]:
    """Of each block, of each head, the share of tokens with a step above 0; [] for a block without memory.

    rows: [T] int64 each
    """
    opened: list[list[Tensor]] = [[] for _ in model.config.blocks]
    for row in rows:
        watch: list[list] = [[] for _ in model.config.blocks]
        model.model.read(model.model.embed_tokens(row.unsqueeze(0)), None, None, watch=watch)
        for found, traces in zip(opened, watch, strict=True):
            found += [trace.gates["eta"][0] > 0 for trace in traces]
    return [torch.cat(found).float().mean(0).tolist() if found else [] for found in opened]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64, help=f"of a book, {ROW} tokens each")
    options = parser.parse_args()
    model = AtlasForCausalLM.from_pretrained(options.model).eval()
    words = load_tokenizer(options.model, model.config.vocab_size)
    ids = torch.from_numpy(book_sentences("validation").encoded(words).ids.astype("int64"))
    first = FIRST if len(ids) > FIRST + options.rows * ROW else 0
    lesson = BABILongLesson(tokenizer=words)
    kinds = {"books": list(ids[first : first + options.rows * ROW].split(ROW))}
    for task in lesson.cells():
        rows = [lesson.row(task, "validation", 2 * ROW, 0, n)[0] for n in range(8)]
        kinds[task] = [torch.from_numpy(row) for row in rows]
    print(
        "| tokens of | " + " | ".join(f"block {i}" for i in range(len(model.config.blocks))) + " |"
    )
    print("|---" * (1 + len(model.config.blocks)) + "|")
    for name, rows in kinds.items():
        shares = open_shares(model, rows)
        shown = [", ".join(f"{100 * x:.2f}" for x in heads) or "–" for heads in shares]
        print(f"| {name} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
