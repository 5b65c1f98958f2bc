"""Train a small model that remembers: letters and their digits, told once, asked for much later.

    python examples/train_recall.py recall-tiny --device cuda        # made examples/recall-tiny

In its texts `k=7 ` is a pair, dots are where nothing happens, and `k?` asks for the digit of k."""

import argparse
import string

import torch
from torch import Tensor

from atlas_lm.models import AtlasForCausalLM
from atlas_lm.models.sizes import configure

LETTERS = torch.tensor(list(string.ascii_lowercase.encode()))
DIGITS = torch.tensor(list(string.digits.encode()))


def spell(letters: Tensor, sign: str, digits: Tensor, dots: int) -> Tensor:
    """[B, pairs] -> [B, pairs * (4 + dots)] bytes."""
    pair = torch.stack([LETTERS[letters], torch.full_like(letters, ord(sign)), DIGITS[digits]], -1)
    rest = torch.tensor(list(b" " + b"." * dots)).expand(*letters.shape, -1)
    return torch.cat([pair, rest], -1).flatten(1)


def texts(batch: int, pairs: int, dots: int, silence: int) -> tuple[Tensor, Tensor]:
    """Pairs with dots after each, silence, then a question for each pair; labels are the answers alone."""
    letters = torch.rand(batch, 26).argsort(1)[:, :pairs]
    digits, order = torch.randint(10, (batch, pairs)), torch.rand(batch, pairs).argsort(1)
    told = spell(letters, "=", digits, dots)
    asked = spell(letters.gather(1, order), "?", digits.gather(1, order), 0)
    ids = torch.cat([told, torch.full((batch, silence), ord(".")), asked], 1)
    labels = torch.full_like(ids, -100)
    labels[:, told.shape[1] + silence + 2 :: 4] = asked[:, 2::4]
    return ids, labels


parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=3000)
parser.add_argument("--device", default="cpu")
if __name__ == "__main__":
    options = parser.parse_args()
    torch.manual_seed(0)
    model = AtlasForCausalLM(configure("deltanet", size="tiny")).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options.steps)
    for step in range(options.steps):  # more pairs, more dots, more silence as it goes
        reach = step / options.steps
        dots, silence = (int(torch.randint(1 + int(n * reach), ())) for n in (12, 150))
        ids, labels = (t.to(options.device) for t in texts(32, 4 + int(12 * reach), dots, silence))
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), rates.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.3f} nats per answer", flush=True)
    model.save_pretrained(options.folder)
