"""Open any model that can be examined: ours, a folder or name of transformers, or a GGUF file."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_lm.cli.common import load_model

if TYPE_CHECKING:
    from atlas_lm.text import Tokenizer

HUB_NAME = re.compile(r"[\w.-]*\w[\w.-]*(/[\w.-]+)?")  # name, or owner/name
DTYPES = ("float32", "bfloat16", "float16")


def open_any(name: str, device: str, dtype: str | None) -> "tuple[Any, Tokenizer]":
    """A causal language model and its tokenizer.

    Args:
        name: a folder, a .gguf file, or a name on the Hugging Face hub.
        dtype: of the weights, e.g. bfloat16; None: as they were saved, for models not ours fp32.

    ValueError: there is none, or it cannot be loaded.
    """
    import torch

    from atlas_lm.text import load_tokenizer

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}, wanted one of {', '.join(DTYPES)}")
    kind = None if dtype is None else getattr(torch, dtype)
    if _is_ours(name):
        model: Any = load_model(name)
        tokenizer = load_tokenizer(name, model.config.vocab_size)
    else:
        model, tokenizer = _from_transformers(name)
    check_device(device)
    return model.to(device, kind or model.dtype).eval(), tokenizer


def check_device(device: str) -> None:
    """ValueError: there is no such device here."""
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used: {error}") from error


def _is_ours(name: str) -> bool:
    try:
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "atlas"


def _from_transformers(name: str) -> "tuple[Any, Tokenizer]":
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from atlas_lm.text import HuggingFaceTokenizer, check_vocabulary

    path, options = name, {}
    if name.endswith(".gguf"):
        path, options = str(Path(name).parent), {"gguf_file": Path(name).name}
    if name.endswith(".gguf") and not Path(name).is_file():
        raise ValueError(f"there is no file {name}")
    if not Path(name).exists() and not HUB_NAME.fullmatch(name):
        raise ValueError(
            f"there is no folder {name}, and no model on the Hugging Face hub is named so"
        )
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype="float32", output_loading_info=True, **options
        )
        tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(path, **options))
    except (OSError, ValueError, ImportError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"model {name!r} cannot be loaded: {error}; wanted a folder of a model, a .gguf file, or a name "
            "on the Hugging Face hub"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    model, report = loaded
    missing = sorted(map(str, report.get("missing_keys", ())))
    if missing:
        raise ValueError(
            f"model {name!r} lacks {len(missing)} of its weights, {missing[0]} among them, so they would be "
            "random; save it anew, or correct its config.json"
        )
    return model, check_vocabulary(tokenizer, model.config.get_text_config().vocab_size)
