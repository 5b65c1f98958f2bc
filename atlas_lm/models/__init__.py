"""One model class for the whole family, at home in the Hugging Face world."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from atlas_lm.models.cache import AtlasCache
from atlas_lm.models.config import AtlasConfig
from atlas_lm.models.modeling import AtlasForCausalLM, AtlasModel
from atlas_lm.models.sizes import configure
from atlas_lm.models.state import StreamState

__all__ = [
    "AtlasCache",
    "AtlasConfig",
    "AtlasForCausalLM",
    "AtlasModel",
    "StreamState",
    "configure",
]

AutoConfig.register("atlas", AtlasConfig, exist_ok=True)
AutoModel.register(AtlasConfig, AtlasModel, exist_ok=True)
AutoModelForCausalLM.register(AtlasConfig, AtlasForCausalLM, exist_ok=True)
