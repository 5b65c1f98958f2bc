"""Every wrong call is refused with what was got, what was wanted, and what to do."""

import dataclasses
import re

import pytest
import torch

from atlas_lm.memory import initial_state, memorize, recall
from atlas_lm.memory.objectives import Huber
from atlas_lm.memory.windows import Window
from atlas_lm.ops.backend import SAID
from tests.builders import random_gates, random_inputs, random_weights, small_spec

BATCH, TOKENS = 2, 7
REMEDY = (
    r"\b(pass|use|make|call|add|drop|squash|move|cast|choose|pack|cumulate|must be|laid out)\b|or '"
)


class Call:
    """A legal call of `memorize`, to be spoiled in one place."""

    def __init__(self, name="titans", batch=BATCH, **changes):
        self.spec = small_spec(name, **changes)
        self.weights, self.state = random_weights(self.spec), None
        self.q, self.k, self.v = random_inputs(self.spec, batch, TOKENS)
        self.gates = random_gates(self.spec, batch, TOKENS)

    def __call__(self, **options):
        return memorize(
            self.spec, self.weights, self.state, self.q, self.k, self.v, self.gates, **options
        )

    def warm(self):
        """The state after this call."""
        return self()[1]


def refuses(call, *words, **options):
    """The call raises a ValueError that holds every word; returns its message."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are looked at below
        call(**options)
    for word in words:
        assert word in str(error.value), str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_wrong_rank(name):
    call = Call()
    setattr(call, name, getattr(call, name)[0])
    refuses(call, f"{name} has shape [7, 2, 4], wanted 4 axes [B, T, H, ", "laid out batch, tokens")


@pytest.mark.parametrize(
    ("name", "axis", "words"),
    [
        ("q", 2, "q has shape [2, 7, 1, 4], wanted [2, 7, 2, 4]"),
        ("k", 2, "axis H is 1 here and 2 elsewhere"),
        ("v", 2, "axis H is 1 here and 2 elsewhere"),
        ("q", 3, "axis K is 1 here and 4 elsewhere"),
        ("k", 3, "axis K is 1 here and 4 elsewhere"),
        ("v", 3, "axis V is 1 here and 4 elsewhere"),
        ("k", 1, "axis T is 1 here and 7 elsewhere"),
        ("v", 0, "axis B is 1 here and 2 elsewhere"),
    ],
)
def test_wrong_sizes(name, axis, words):
    call = Call()
    setattr(call, name, getattr(call, name).narrow(axis, 0, 1))
    refuses(call, name, words, "pass tensors, weights and state that were made for the same spec")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_that_are_not_floats(name, dtype):
    call = Call()
    setattr(call, name, getattr(call, name).to(dtype))
    refuses(call, f"{name} is {dtype}, wanted one of", "torch.float32")


def test_gates_that_are_not_floats():
    call = Call()
    call.gates["eta"] = torch.ones(BATCH, TOKENS, 2, dtype=torch.int64)
    refuses(call, "eta is torch.int64, wanted one of", "torch.float32")


def test_a_missing_gate():
    call = Call()
    del call.gates["theta"]
    refuses(
        call,
        "gates are ['eta', 'log_alpha']",
        "reads ['eta', 'log_alpha', 'theta']",
        "add ['theta']",
    )


def test_no_gates_at_all():
    call = Call()
    call.gates = None
    refuses(call, "gates are []", "add ['eta', 'theta', 'log_alpha']")


def test_an_unknown_gate():
    call = Call()
    call.gates["mood"] = call.gates["eta"]
    refuses(call, "gates are ['eta', 'log_alpha', 'mood', 'theta']", "drop ['mood']")


@pytest.mark.parametrize(
    ("name", "gate", "axes"),
    [("titans", "eta", "[B, T, H]"), ("omeganet", "gamma", "[B, T, H, offsets]")],
)
def test_wrong_gate_shape(name, gate, axes):
    call = Call(name)
    wanted = list(call.gates[gate].shape)
    call.gates[gate] = call.gates[gate][..., :1]
    got = list(call.gates[gate].shape)
    refuses(call, f"gate {gate} has shape {got}, wanted {wanted} for {axes}")


OUT_OF_RANGE = [
    ("eta", -0.1, "[0, inf"),
    ("eta", torch.nan, "[0, inf"),
    ("log_alpha", 0.1, "[-inf, 0]"),
    ("log_alpha", torch.nan, "[-inf, 0]"),
    ("theta", -0.1, "[0, 1)"),
    ("theta", 1.0, "[0, 1)"),
    ("theta", torch.nan, "[0, 1)"),
    ("gamma", -0.1, "[0, 1]"),
    ("gamma", 1.1, "[0, 1]"),
    ("delta", -0.1, "[0, inf"),
]


def call_with(gate, value, where=(1, 3)):
    """A call that reads every gate, with one value of one gate out of range."""
    call = Call("titans", window=Window(size=3, gate="pair"), objective=Huber())
    assert set(call.gates) == {"eta", "log_alpha", "theta", "gamma", "delta"}
    call.gates[gate][where] = value
    return call


@pytest.mark.parametrize(("gate", "value", "legal"), OUT_OF_RANGE)
def test_gate_values_out_of_range(gate, value, legal):
    words = "pass the logarithm" if gate == "log_alpha" else "squash it before the call"
    refuses(
        call_with(gate, value),
        f"gate {gate} is {value:g} at [1, 3, 0], wanted a number in {legal}",
        words,
    )


def test_an_infinite_step_is_refused():
    """It leaves nothing but NaN."""
    refuses(call_with("eta", torch.inf), "gate eta is inf at [1, 3, 0], wanted a number in")


def test_gate_values_per_offset_name_the_offset():
    call = Call("omeganet")
    call.gates["gamma"][1, 3, 0, 2] = 7
    refuses(call, "gate gamma is 7 at [1, 3, 0, 2], wanted a number in [0, 1]")


@pytest.mark.parametrize(("gate", "value", "legal"), OUT_OF_RANGE)
def test_gate_values_are_looked_at_on_valid_tokens_only(gate, value, legal):
    call, valid = call_with(gate, value), torch.ones(BATCH, TOKENS, dtype=torch.bool)
    refuses(call, f"gate {gate}", legal, valid=valid)
    valid[1, 3] = False
    y, _ = call(valid=valid)
    assert bool(y.isfinite().all())


@pytest.mark.parametrize(("gate", "value", "legal"), OUT_OF_RANGE)
def test_check_false_does_not_look_at_values(gate, value, legal):
    call = call_with(gate, value)
    y, _ = call(check=False)
    assert torch.equal(
        y[0], Call("titans", window=Window(size=3, gate="pair"), objective=Huber())()[0][0]
    )


@pytest.mark.parametrize(
    ("gate", "value"),
    [("eta", 0.0), ("log_alpha", 0.0), ("log_alpha", -torch.inf), ("theta", 0.0), ("gamma", 1.0)],
)
def test_the_ends_of_a_range_are_legal(gate, value):
    y, _ = call_with(gate, value)()
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_valid_that_is_not_bool(dtype):
    valid = torch.ones(BATCH, TOKENS, dtype=dtype)
    refuses(
        Call(), f"valid is {dtype}, wanted bool", "pass e.g. attention_mask.bool()", valid=valid
    )


def test_valid_of_another_shape():
    valid = torch.ones(BATCH, TOKENS + 1, dtype=torch.bool)
    refuses(Call(), "valid has shape [2, 8], wanted [2, 7]", valid=valid)


@pytest.mark.parametrize("axis", [0, 1])
def test_nothing_to_write(axis):
    call = Call()
    for name in "qkv":
        setattr(call, name, getattr(call, name).narrow(axis, 0, 0))
    call.gates = {n: g.narrow(axis, 0, 0) for n, g in call.gates.items()}
    shape = [0, 7, 2, 4] if axis == 0 else [2, 0, 2, 4]
    refuses(call, f"q has shape {shape}: nothing to write", "pass at least one row and one token")


def test_packing_wants_one_row():
    borders = torch.tensor([0, 3, TOKENS])
    refuses(Call(), "the batch is 2, wanted 1", "pack all rows into one", cu_seqlens=borders)


@pytest.mark.parametrize(
    "borders",
    [[0, 4, 3, 7], [0, 3], [0, 3, 9], [0, 3, 3, 7], [0, 7, 7], [0, 0, 7], [1, 7], [0], [], [7]],
)
def test_borders_that_do_not_rise_from_0_to_the_end(borders):
    """Falling, short, too long, with an empty sequence, not from zero."""
    refuses(
        Call(batch=1),
        f"cu_seqlens is {borders}" if borders else "cu_seqlens is [0]",
        "wanted rising borders 0, ..., 7: one more than there are sequences, none of them empty",
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
    )


def test_borders_with_two_axes():
    refuses(Call(batch=1), "cu_seqlens is [1, 2]", "wanted", cu_seqlens=torch.tensor([[0, TOKENS]]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(chunk=12), "timing.chunk is 6 and 12 (this spec, the state's)"),
        (dict(objective=Huber(delta=2.0)), "objective.delta is None and 2.0"),
        (dict(heads=1), "heads is 2 and 1"),
    ],
)
def test_a_state_of_another_spec_names_the_field(changes, words):
    call = Call()
    call.state = Call(**changes).warm()
    refuses(
        call,
        "the state belongs to another spec",
        words,
        "pass the spec that the state was made with",
    )


def test_a_state_of_another_batch():
    call = Call()
    call.state = Call(batch=3).warm()
    refuses(call, "has shape [3, 2, ", "wanted [2, 2, ", "the batch must be the one")


def test_a_state_of_the_wrong_number_of_sequences():
    call = Call(batch=1)
    call.state = call.warm()
    borders = torch.tensor([0, 3, TOKENS])
    refuses(call, "has shape [1, 2, ", "wanted [2, 2, ", "one row per sequence", cu_seqlens=borders)


def test_a_state_of_another_dtype():
    call = Call()
    call.state = call.warm().to(torch.float32)
    words = "the state is torch.float32 on cpu, inputs want torch.float64 on cpu"
    refuses(call, words, "call state.to(torch.float64)")


def test_a_state_that_lacks_a_tensor():
    call = Call()
    call.state = dataclasses.replace(call.warm(), momentum={})
    refuses(call, "the state has tensors", "wanted", "make it with initial_state")


def test_weights_of_another_spec():
    call = Call()
    call.weights = random_weights(small_spec("omeganet"))
    words = "this spec has ['memory.w0', 'memory.w1']"
    refuses(call, "weights are ['features.amplitudes'", words, "make them with spec.init_weights()")


def test_weights_of_other_sizes():
    call = Call()
    call.weights["memory.w0"] = call.weights["memory.w0"][:, :3]
    words = "weight memory.w0 has shape [2, 3, 4], wanted [2, 16, 4]"
    refuses(call, words, "make them with spec.init_weights() of the same spec")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("titans", dict(chunk=1), "a memory that is not a plain matrix is not linear"),
        ("deltanet", dict(objective=Huber()), "the Huber objective is not linear"),
        ("atlas", dict(chunk=1, period=1), "Newton-Schulz with chunk 1"),
        (
            "omeganet",
            dict(retention=small_spec("lact").retention),
            "renormalising after every token",
        ),
    ],
)
def test_parallel_says_why_it_declines(name, changes, reason):
    call = Call(name, **changes)
    refuses(call, "no parallel form", reason, "use form='reference' or 'auto'", form="parallel")
    assert torch.equal(call(form="auto")[0], call(form="reference")[0])


def test_auto_says_once_why_it_runs_token_by_token(caplog):
    SAID.clear()
    call = Call(chunk=1)
    for _ in range(3):
        call(form="auto")
    assert [r.getMessage() for r in caplog.records if "token by token" in r.getMessage()] == [
        "running token by token: the online rule (chunk 1) of a memory that is not a plain matrix is "
        "not linear"
    ]


def test_an_unknown_form():
    refuses(
        Call(), "form is 'fast', wanted 'auto', 'fused', 'parallel' or 'reference'", form="fast"
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda c: dict(q=c.q[0]), ["q has shape [7, 2, 4], wanted 4 axes"]),
        (lambda c: dict(q=c.q[..., :1]), ["axis K is 1 here and 4 elsewhere", "pass"]),
        (lambda c: dict(q=c.q.long()), ["q is torch.int64, wanted one of"]),
        (lambda c: dict(q=c.q[:, :0]), ["q has no tokens", "pass at least one query"]),
        (
            lambda c: dict(q=c.q.float()),
            ["torch.float64 on cpu, inputs want torch.float32", "call"],
        ),
        (lambda c: dict(q=c.q[:1]), ["has shape [2, 2, ", "wanted [1, 2, "]),
        (lambda c: dict(weights={}), ["weights are []", "make them with spec.init_weights()"]),
        (lambda c: dict(spec=small_spec("titans", chunk=12)), ["timing.chunk is 12 and 6"]),
    ],
)
def test_recall_refuses_alike(spoil, words):
    call = Call()
    arguments = dict(spec=call.spec, weights=call.weights, state=call.warm(), q=call.q)
    refuses(lambda: recall(**(arguments | spoil(call))), *words)


def test_legal_calls_pass():
    """The call that all tests spoil is itself legal, with a state and packed."""
    call = Call()
    call.state = initial_state(call.spec, call.weights, BATCH, dtype=torch.float64)
    assert torch.equal(call()[0], Call()()[0])
    packed = Call(batch=1)
    y, state = packed(cu_seqlens=torch.tensor([0, 3, TOKENS]))
    assert y.shape == packed.v.shape and state.position.tolist() == [3, 4]


def spoiled(**fields):
    call = Call(batch=fields.pop("batch", BATCH))
    for name, change in fields.items():
        setattr(call, name, change(getattr(call, name)))
    return call


MESSAGES = {
    "rank": lambda: (spoiled(q=lambda q: q[0]), {}),
    "size": lambda: (spoiled(q=lambda q: q[..., :1]), {}),
    "dtype": lambda: (spoiled(q=lambda q: q.long()), {}),
    "no tokens": lambda: (
        spoiled(q=lambda q: q[:, :0], k=lambda k: k[:, :0], v=lambda v: v[:, :0]),
        {},
    ),
    "missing gate": lambda: (spoiled(gates=lambda g: {}), {}),
    "gate shape": lambda: (spoiled(gates=lambda g: g | {"eta": g["eta"][:, :3]}), {}),
    "gate value": lambda: (spoiled(gates=lambda g: g | {"eta": -g["eta"]}), {}),
    "valid": lambda: (Call(), dict(valid=torch.ones(BATCH, TOKENS))),
    "batch of packed": lambda: (Call(), dict(cu_seqlens=torch.tensor([0, TOKENS]))),
    "borders": lambda: (Call(batch=1), dict(cu_seqlens=torch.tensor([0, 3]))),
    "weights": lambda: (spoiled(weights=lambda w: {}), {}),
    "weight shape": lambda: (spoiled(weights=lambda w: w | {"memory.w0": w["memory.w1"]}), {}),
    "state of another spec": lambda: (spoiled(state=lambda _: Call(chunk=12).warm()), {}),
    "state of another batch": lambda: (spoiled(state=lambda _: Call(batch=3).warm()), {}),
    "state of another dtype": lambda: (
        spoiled(state=lambda _: Call().warm().to(torch.float32)),
        {},
    ),
    "declined": lambda: (Call(chunk=1), dict(form="parallel")),
    "form": lambda: (Call(), dict(form="fused")),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_message_says_what_to_do(kind):
    call, options = MESSAGES[kind]()
    message = refuses(call, **options)
    assert re.search(REMEDY, message), message
