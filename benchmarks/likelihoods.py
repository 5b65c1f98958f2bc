"""Our reading of a model beside that of the harness' own `hf` model: log-likelihoods of the same endings.

    ATLAS_DATA=… python benchmarks/likelihoods.py MODEL

MODEL: a folder, a .gguf file, or a name on the Hugging Face hub. Fails if an ending differs by over 1e-3.
"""

import argparse
from typing import Any

from lm_eval.models.huggingface import HFLM

from atlas_lm.cli.models import open_any
from atlas_lm.evaluate.opening import open_reader
from atlas_lm.evaluate.requests import weigh
from atlas_lm.evaluate.tasks.harness import Harness
from atlas_lm.evaluate.tasks.options import Options

TASKS = ("piqa", "hellaswag", "arc_easy", "winogrande")
BATCH = 8  # questions
MOST = 1e-3  # nats


def flat(groups: list[list[Any]]) -> list[Any]:
    return [request for group in groups for request in group]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--samples", type=int, default=24, help="questions of each task")
    options = parser.parse_args()
    model, tokenizer = open_any(options.model, "cpu", None)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer.tokenizer, batch_size=BATCH)
    ours = open_reader(model, tokenizer, name="model")
    for name in TASKS:
        groups = Harness(name, Options(count=options.samples))._requests
        wanted = theirs.loglikelihood(flat(groups))
        found = [
            response.value
            for first in range(0, len(groups), BATCH)
            for response in weigh(ours, flat(groups[first : first + BATCH]), lambda tokens: None)
        ]
        furthest = max(abs(f[0] - w[0]) for f, w in zip(found, wanted, strict=True))
        greedy = all(f[1] == w[1] for f, w in zip(found, wanted, strict=True))
        print(f"{name}: {len(found)} endings, furthest {furthest:.1e} nats, greedy equal: {greedy}")
        if furthest > MOST or not greedy:
            raise SystemExit(f"{name} is read otherwise than by the harness")


if __name__ == "__main__":
    main()
