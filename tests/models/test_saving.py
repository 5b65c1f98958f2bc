"""save_pretrained, from_pretrained and the Auto classes; configurations that cannot be."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from atlas_lm.doctor.subjects import small_spec
from atlas_lm.memory import presets
from atlas_lm.memory.features import Sketch
from atlas_lm.models import AtlasConfig, AtlasForCausalLM, AtlasModel
from atlas_lm.models.fingerprint import config_record, fingerprint
from atlas_lm.models.sizes import SIZES, configure
from tests.models.builders import KINDS, random_ids, small_config, small_model


@pytest.mark.parametrize(("block", "rule"), KINDS, ids=str)
def test_a_saved_model_is_the_same_to_the_last_bit(block: str, rule: str, tmp_path: Path) -> None:
    model, ids = small_model(block, rule), random_ids(2, 30)
    model.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, AtlasForCausalLM) and again.config.spec == model.config.spec
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert fingerprint(again) == fingerprint(model)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, AtlasModel)


def test_random_maps_are_saved_with_the_model(tmp_path: Path) -> None:
    spec = small_config("lmm", "titans").spec.replace(features=Sketch(degree=2, sketch=8))
    torch.manual_seed(0)
    model = AtlasForCausalLM(small_config("lmm", "titans", memory=spec))
    frozen = {n for n, _ in model.named_buffers()}
    assert frozen and not frozen & {n for n, _ in model.named_parameters()}
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        ids = random_ids(1, 20)
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_from_config_draws_from_the_seed() -> None:
    config, ids = small_config("mag", "atlas"), random_ids(1, 10)
    logits = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            logits.append(AutoModelForCausalLM.from_config(config).eval()(ids).logits)
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("preset", ["transformer", *presets.PRESETS])
def test_every_preset_makes_a_model_that_starts_near_the_uniform_guess(preset: str) -> None:
    torch.manual_seed(0)
    config = configure(preset)
    model, ids = AtlasForCausalLM(config), random_ids(2, 40)
    loss = model(ids, labels=ids).loss
    assert abs(loss.item() - torch.tensor(config.vocab_size).log().item()) < 0.5
    loss.backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not dead and all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_the_config_survives_json(tmp_path: Path) -> None:
    config = configure(
        "atlas_pp", block=["mag", "lmm"], size="tiny", vocab_size=500, bos_token_id=3
    )
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, AtlasConfig)
    assert again.spec == config.spec and again.blocks == ["mag", "lmm"] and again.bos_token_id == 3
    assert config_record(again) == config_record(config)


def test_the_fingerprint_sees_every_weight_and_nothing_else() -> None:
    model = small_model()
    before = fingerprint(model)
    model.config.use_cache = False
    assert fingerprint(model) == before
    with torch.no_grad():
        model.model.layers[1].mixer.memory.gates.eta_bias[0, 0] += 1e-3
    assert fingerprint(model) != before
    assert fingerprint(small_model(seed=1)) != before == fingerprint(small_model())


def test_a_margin_of_gates_is_part_of_the_model_and_none_is_not() -> None:
    """Memory files from before there was one belong to the same model as before."""
    plain, closing = small_model(), small_model(gate_margin=0.1)
    assert "gate_margin" not in config_record(plain.config)
    assert config_record(closing.config)["gate_margin"] == 0.1
    ids = random_ids(1, 30)
    assert not torch.equal(plain(ids).logits, closing(ids).logits)
    with torch.no_grad():
        closing.load_state_dict(plain.state_dict())
    assert fingerprint(plain) != fingerprint(closing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(blocks="mga"), r"blocks has \['mga'\], wanted some of attention"),
        (dict(blocks=["lmm"]), "1 entries for 2 layers"),
        (dict(memory=None), "memory is None"),
        (dict(combine="mean"), "combine is 'mean'"),
        (dict(num_key_value_heads=3), "no multiple"),
        (dict(head_dim=7), "even number"),
        (dict(sliding_window=0), "sliding_window is 0"),
        (dict(gate_margin=0.5), "gate_margin is 0.5, wanted 0 or more and less than 0.5"),
        (dict(blocks="mac", memory=small_spec("softmax_attention")), "kept pairs"),
    ],
)
def test_configurations_that_cannot_be(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config("mag", "titans", **changes)


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="size is '7B', wanted one of tiny"):
        configure("atlas", size="7B")
    with pytest.raises(ValueError, match="preset is 'titan', wanted one of transformer"):
        configure("titan")
    with pytest.raises(ValueError, match="no memory to change"):
        configure("transformer", memory={"chunk": 8})


def test_deep_memories_of_models_are_pulled_to_their_start() -> None:
    assert configure("atlas").spec.retention.kind == "decay_to_start"
    assert configure("gated_deltanet").spec.retention.kind == "decay"
    assert all(configure("titans", size=size).spec.heads == SIZES[size].heads for size in SIZES)
