"""All initialisation of a model, in one place."""

import math

import torch
from torch import nn
from transformers import initialization as init

from atlas_lm.blocks.persistent import Persistent
from atlas_lm.layers.conv import ShortConv
from atlas_lm.layers.gates import Gates
from atlas_lm.layers.memory import MemoryWeights
from atlas_lm.layers.norm import RMSNorm
from atlas_lm.layers.out import OutLinear, OutNorm
from atlas_lm.models.config import AtlasConfig


def initialize(module: nn.Module, config: AtlasConfig) -> None:
    """Give the module's own weights their first values; called once for every module that has some.

    Linear maps and embeddings are normal with the config's range. What is added to the model's stream is
    smaller by sqrt(2 layers), so that depth does not inflate it. Convolutions start as torch's do,
    gates at the values of `memory/defaults.py`, memories as their spec says.
    """
    std = config.initializer_range
    residual = 1 / math.sqrt(2 * config.num_hidden_layers)
    if isinstance(module, OutLinear):
        init.normal_(module.weight, std=std * residual)
    elif isinstance(module, OutNorm):
        init.constant_(module.weight, residual)
    elif isinstance(module, nn.Linear | nn.Embedding):
        init.normal_(module.weight, std=std)
    elif isinstance(module, RMSNorm):
        init.ones_(module.weight)
    elif isinstance(module, Persistent):
        init.normal_(module.tokens, std=1.0)  # they stand beside normed inputs
    elif isinstance(module, ShortConv):
        limit = module.weight.shape[0] ** -0.5
        init.uniform_(module.weight, -limit, limit)
    elif isinstance(module, Gates):
        for name, start in module.starts().items():
            init.constant_(getattr(module, name), start)
    elif isinstance(module, MemoryWeights):
        _initialize_memory(module)


def _initialize_memory(weights: MemoryWeights) -> None:
    """The initial memory and the weights of its parts, random ones from torch's generator."""
    named = weights()
    if any(weight.is_meta for weight in named.values()):
        return
    seed = int(torch.randint(2**31, ()))
    for name, value in weights.spec.init_weights(seed).items():
        init.copy_(named[name], value)
