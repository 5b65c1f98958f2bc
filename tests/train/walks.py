"""Runs as programs of their own, for tests that kill them or start several: `python -m tests.train.walks`."""

import argparse
import json
from pathlib import Path

import torch

from atlas_lm.train.listener import Listener, Report
from atlas_lm.train.machine import join
from atlas_lm.train.place import Place
from atlas_lm.train.recipe import Optimizer
from atlas_lm.train.run import train
from tests.train.builders import Walks, small_recipe

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--preset", default="titans")
parser.add_argument("--optimizer", default="adamw")
parser.add_argument("--spread")
parser.add_argument("--micro", type=int)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--stop", type=int, help="after so many steps, as a signal would")


class Echo(Listener):
    """Says every finished step, for whoever waits to kill this."""

    def __init__(self, stop: int | None) -> None:
        self.stop = stop

    def stepped(self, report: Report) -> None:
        print(json.dumps([report.step, report.loss]), flush=True)
        if report.step == self.stop:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = parser.parse_args()
    recipe = small_recipe(
        given.preset,
        source=Walks(carries=True),
        segment=12,
        steps=given.steps,
        optimizer=Optimizer(kind=given.optimizer, rate=1e-2),
    )
    with join("cpu") as machine:
        place = Place(
            out=given.out,
            spread=given.spread,
            micro=given.micro,
            workers=0,
            save_every=3,
        )
        train(recipe, place, machine, [Echo(given.stop)])
