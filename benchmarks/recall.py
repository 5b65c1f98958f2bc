"""What examples/recall-tiny remembers, by the length of the silence:
`python benchmarks/recall.py --device cuda`.

Texts are drawn anew as in examples/train_recall.py and read in segments of 2048 tokens, the state carried on.
The rows up to 10,000 dots run on a CPU in a minute: `python benchmarks/recall.py --most 10000`.
"""

import argparse
import importlib.util
from pathlib import Path

import torch

from atlas_lm.models import AtlasCache, AtlasForCausalLM

EXAMPLES = Path(__file__).parent.parent / "examples"
SEGMENT = 2048
ROWS = [  # pairs, dots after each, dots before the questions, texts
    (16, 12, 150, 32),
    (16, 12, 1_000, 32),
    (16, 0, 10_000, 32),
    (26, 3, 1_000, 32),
    (16, 3, 100_000, 32),
    (26, 3, 100_000, 32),
    (8, 0, 1_000_000, 4),
]


def load_texts():
    """The function that draws texts, from the example that trained on them."""
    spec = importlib.util.spec_from_file_location("train_recall", EXAMPLES / "train_recall.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.texts


@torch.no_grad()
def right_answers(model: AtlasForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each answer whether the likeliest token was it. ids, labels: [B, T] -> [answers] bool"""
    cache, found = AtlasCache(), []
    following = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    for part, wanted in zip(ids.split(SEGMENT, 1), following.split(SEGMENT, 1), strict=True):
        made = model(part, past_key_values=cache).logits.argmax(-1)
        found.append((made == wanted)[wanted >= 0])
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=EXAMPLES / "recall-tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most", type=int, default=1_000_000, help="dots before the questions")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    model = AtlasForCausalLM.from_pretrained(options.model).to(options.device).eval()
    texts = load_texts()
    torch.manual_seed(options.seed)
    print("| pairs | dots after each | dots before the questions | texts | right |")
    for pairs, dots, silence, number in ROWS:
        if silence <= options.most:
            ids, labels = (t.to(options.device) for t in texts(number, pairs, dots, silence))
            right = right_answers(model, ids, labels)
            share = f"{100 * right.float().mean():.1f} % of {len(right)}"
            print(f"| {pairs} | {dots} | {silence:,} | {number} | {share} |", flush=True)


if __name__ == "__main__":
    main()
