"""What several commands share: open a model, fail in one line."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from atlas_lm.models import AtlasForCausalLM


def fail(command: str, error: object, code: int = 2) -> NoReturn:
    """Say on stderr what is wrong, in one line, and leave."""
    from rich.console import Console

    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    text = " ".join(text.split())
    console = Console(stderr=True)
    console.print(f"atlas {command}: {text}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code) from (error if isinstance(error, BaseException) else None)


def load_model(path: str | Path) -> "AtlasForCausalLM":
    """The model in a folder, ready to read. ValueError: there is none, or it is not one of ours."""
    folder = Path(path)
    _check_folder(folder)
    from safetensors import SafetensorError
    from transformers.utils import logging

    from atlas_lm.models import AtlasForCausalLM

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would warn of is an error below
    try:
        loaded: Any = AtlasForCausalLM.from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"the model in {folder} cannot be loaded: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    model, report = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        raise ValueError(
            f"the weights in {folder} are not those of its config.json: {wrong}; save the model again"
        )
    opened: AtlasForCausalLM = model.eval()
    return opened


def _check_folder(folder: Path) -> None:
    """Refuse what is no folder of an atlas model, before anything large is read."""
    wanted = "wanted a folder as save_pretrained writes it, with config.json and model.safetensors"
    if not folder.is_dir():
        raise ValueError(
            f"model {folder} is {'a file' if folder.exists() else 'missing'}, {wanted}"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no config.json, {wanted}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}/config.json cannot be read ({error}), {wanted}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "atlas":
        raise ValueError(
            f"{folder} holds a model of type {kind!r}, wanted 'atlas', one with a memory"
        )
