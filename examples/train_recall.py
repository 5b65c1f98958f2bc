"""Train a small model that remembers: letters and their digits, told once, asked for much later.

    python examples/train_recall.py recall-model --steps 2000

A text reads `k=7 ` for a pair and dots where nothing happens; `k?` asks, and the answer is `7`. What the model
learns is to write pairs, to keep them through the dots, and to find them again.
"""

import argparse
import string

import torch
from torch import Tensor

from atlas_lm.models import AtlasForCausalLM
from atlas_lm.models.sizes import configure

LETTERS = torch.tensor(list(string.ascii_lowercase.encode()))
DIGITS = torch.tensor(list(string.digits.encode()))


def texts(batch: int, pairs: int, dots: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Pairs, each followed by dots, then a question for every pair; labels are the answers alone."""
    letters = torch.rand(batch, 26).argsort(1)[:, :pairs]
    digits = torch.randint(10, (batch, pairs))
    order = torch.rand(batch, pairs).argsort(1)

    def spell(letters: Tensor, sign: str, digits: Tensor, rest: str) -> Tensor:
        """[batch, pairs] -> [batch, pairs * length]"""
        fixed = torch.tensor(list(rest.encode())).expand(batch, letters.shape[1], -1)
        signs = torch.full_like(letters, ord(sign))
        pair = torch.stack([LETTERS[letters], signs, DIGITS[digits]], dim=-1)
        return torch.cat([pair, fixed], dim=-1).flatten(1)

    told = spell(letters, "=", digits, " " + "." * dots)
    asked = spell(letters.gather(1, order), "?", digits.gather(1, order), " ")
    labels = torch.full_like(asked, -100)
    labels[:, 2::4] = asked[:, 2::4]
    ids = torch.cat([told, asked], dim=1)
    return ids.to(device), torch.cat([torch.full_like(told, -100), labels], dim=1).to(device)


def train(model: AtlasForCausalLM, steps: int, batch: int, rate: float, device: str) -> float:
    """More pairs and more dots as training goes on. Returns the last loss, in nats per answer."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    warm = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        done = step / steps
        ids, labels = texts(batch, 4 + int(12 * done), int(torch.randint(int(1 + 24 * done), ())), device)
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.3f}", flush=True)
    return loss.item()
