"""The loss of a head by blocks of rows against all logits at once, in values and gradients."""

import pytest
import torch

from atlas_lm.ops.linear_cross_entropy import blocks, linear_cross_entropy
from tests.builders import leaf, seeded
from tests.ops.judging import assert_near, assert_within_twice

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
WIDTH, VOCAB = 6, 19
FORMS = ["parallel", "fused"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Three rows at a time."""
    monkeypatch.setattr(blocks, "LOGITS", 3 * VOCAB)


def draw(rows, *, ignored=(), dtype=torch.float64, width=WIDTH, vocab=VOCAB):
    generator = seeded(0)
    hidden, weight = (torch.randn(n, width, generator=generator) for n in (rows, vocab))
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[list(ignored)] = -100
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE)


def run(form, hidden, weight, labels, scale=0.3, **options):
    """The loss, and the gradients of `scale` times the loss."""
    if form == "fused":
        pytest.importorskip("triton", reason="the fused form is written in Triton")
    hidden, weight = leaf(hidden), leaf(weight)
    loss, _ = linear_cross_entropy(hidden, weight, labels, form=form, **options)
    dhidden, dweight = torch.autograd.grad(scale * loss, (hidden, weight))
    return {"loss": loss.detach(), "dhidden": dhidden, "dweight": dweight}


def dtype_of(form):
    """Kernels do not take fp64."""
    return torch.float64 if form == "parallel" else torch.float32


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 11])
def test_blocks_are_the_whole(form, rows):
    given = draw(rows, ignored=range(1, rows, 4), dtype=dtype_of(form))
    wanted = run("reference", *given)
    assert_near(run(form, *given), wanted, 1e-14 if form == "parallel" else 1e-6)


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_rows_without_a_label_ask_for_nothing(form):
    hidden, weight, labels = draw(8, ignored=(0, 3, 4, 7), dtype=dtype_of(form))
    got = run(form, hidden, weight, labels)
    kept = (labels != -100).nonzero()[:, 0]
    alone = run("reference", hidden[kept], weight, labels[kept])
    assert bool((got["dhidden"][labels == -100] == 0).all())
    assert_near(got | {"dhidden": got["dhidden"][kept]}, alone, 1e-6)
    assert linear_cross_entropy(hidden, weight, labels, form=form)[1].item() == 4


@pytest.mark.parametrize("form", ["reference", *FORMS])
@pytest.mark.parametrize("rows", [0, 5])
def test_no_labels_at_all(form, rows):
    given = draw(rows, ignored=range(rows), dtype=dtype_of(form))
    got = run(form, *given)
    assert all(bool((x == 0).all()) for x in got.values())
    assert got["dweight"].shape == (VOCAB, WIDTH)


@pytest.mark.parametrize("form", FORMS)
def test_any_label_can_be_the_ignored_one(form):
    """Also one that the vocabulary has."""
    given = draw(7, dtype=dtype_of(form))
    ignored = int(given[2][2])
    wanted = run("reference", *given, ignore_index=ignored)
    assert_near(run(form, *given, ignore_index=ignored), wanted, 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_what_stands_in_an_ignored_row_of_huge_logits_does_not_spread(form):
    hidden, weight, labels = draw(4, ignored=(1,), dtype=dtype_of(form))
    hidden[1], hidden[2] = (
        1e4,
        1e3,
    )  # sums of exponentials that overflow unless the largest is taken off
    got, wanted = (run(f, hidden, weight, labels) for f in (form, "reference"))
    assert_near(got, wanted, 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_rows_of_the_vocabulary_may_span_several_blocks_of_a_program(form, monkeypatch):
    pytest.importorskip("triton", reason="the fused form is written in Triton")
    from atlas_lm.ops.linear_cross_entropy import fused

    monkeypatch.setattr(fused, "BLOCK", 8)
    given = draw(4, ignored=(2,), dtype=torch.float32)
    assert_near(run(form, *given), run("reference", *given), 1e-6)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_costs_the_other_nothing(frozen):
    hidden, weight, labels = draw(7)
    wanted = run("reference", hidden, weight, labels, scale=1.0)
    sides = [hidden, leaf(weight)] if frozen == 0 else [leaf(hidden), weight]
    loss, _ = linear_cross_entropy(*sides, labels)
    loss.backward()
    side, name = sides[1 - frozen], ("dweight", "dhidden")[frozen]
    assert sides[frozen].grad is None
    assert_near({name: side.grad}, {name: wanted[name]}, 1e-14)


def test_without_gradients_it_is_the_loss_alone():
    given = draw(7, ignored=(1,))
    with torch.no_grad():
        got, _ = linear_cross_entropy(*given)
    assert not got.requires_grad
    assert_near({"loss": got}, {"loss": run("reference", *given)["loss"]}, 1e-14)


def test_the_gradient_can_be_asked_for_twice():
    """Nothing is scaled in place."""
    hidden, weight, labels = draw(5)
    hidden = leaf(hidden)
    loss, _ = linear_cross_entropy(hidden, weight, labels)
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_second_derivative_is_refused():
    hidden, weight, labels = draw(5)
    hidden = leaf(hidden)
    loss, _ = linear_cross_entropy(hidden, weight, labels)
    (grad,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_the_weight_is_summed_in_fp32_over_blocks():
    """In bf16 a sum of 3,000 rows would stand still long before its end."""
    hidden = torch.ones(3000, 1, dtype=torch.bfloat16)
    weight = torch.zeros(4, 1, dtype=torch.bfloat16)
    labels = torch.zeros(3000, dtype=torch.int64)
    got = run("parallel", hidden, weight, labels, scale=1.0)["dweight"]
    wanted = torch.tensor([[-2250.0], [750.0], [750.0], [750.0]])
    assert torch.equal(got, wanted.bfloat16())


def test_products_under_autocast_are_in_its_dtype_and_gradients_in_that_of_the_weights():
    hidden, weight, labels = draw(11, dtype=torch.float32)
    truth = run("reference", hidden.double(), weight.double(), labels)
    with torch.autocast(DEVICE, torch.bfloat16):
        got, plain = (run(form, hidden, weight, labels) for form in ("parallel", "reference"))
    assert all(x.dtype == torch.float32 for x in got.values())
    assert_within_twice(got, plain, truth)
    assert not torch.equal(got["dhidden"], run("parallel", hidden, weight, labels)["dhidden"])


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>")  # of dynamo
def test_it_compiles_to_one_graph():
    torch._dynamo.reset()
    given = draw(7, ignored=(1,))

    def loss(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels)[0]

    hidden, weight = leaf(given[0]), leaf(given[1])
    torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden, weight, given[2]).backward()
    wanted = run("reference", *given, scale=1.0)
    got = {"dhidden": hidden.grad, "dweight": weight.grad}
    assert_near(got, {n: wanted[n] for n in got}, 1e-14)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(weight=torch.zeros(5, 4)), r"weight has shape \[5, 4\], wanted \[5, 6\]"),
        (dict(labels=torch.zeros(3, dtype=torch.int64)), r"labels has shape \[3\], wanted \[2\]"),
        (dict(labels=torch.zeros(2, dtype=torch.int32)), r"torch.int32, wanted torch.int64"),
        (dict(weight=torch.zeros(5, 6).half()), "hidden is torch.float32 and weight torch.float16"),
        (dict(form="fast"), "form is 'fast'"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    fields = dict(
        hidden=torch.zeros(2, 6),
        weight=torch.zeros(5, 6),
        labels=torch.zeros(2, dtype=torch.int64),
    )
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**(fields | change))


@pytest.mark.skipif(CUDA, reason="a bad label stops the device for good")
@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_a_label_that_the_vocabulary_does_not_have_is_refused(form):
    hidden, weight, labels = draw(4, dtype=torch.float32)
    labels[1] = VOCAB
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        run(form, hidden, weight, labels)


class TestOnTheDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(("rows", "vocab"), [(700, 32_000), (300, 50_257)])
    def test_real_sizes(self, form, dtype, rows, vocab, monkeypatch):
        """Blocks of 128 rows."""
        monkeypatch.setattr(blocks, "LOGITS", 130 * vocab)
        hidden, weight, labels = draw(rows, ignored=(0, 128, 255), width=256, vocab=vocab)
        given = (hidden.to(dtype), (weight / 16).to(dtype), labels)
        truth = run("reference", *(x.double() for x in given[:2]), labels)
        plain = run("reference", *given)
        slack = 1.2e-7 if dtype == torch.float32 else 0.0
        assert_within_twice(run(form, *given), plain, truth, slack)

    def test_auto_is_fused_and_the_same_in_every_run(self, monkeypatch):
        monkeypatch.setattr(blocks, "LOGITS", 130 * 32_000)
        given = draw(700, width=256, vocab=32_000, dtype=torch.bfloat16)
        auto, fused = run("auto", *given), run("fused", *given)
        assert all(torch.equal(auto[name], fused[name]) for name in fused)

    def test_all_logits_never_exist(self):
        """64 Ki rows of 32,000 logits would be 4 GB in bf16, and twice that for their gradient."""
        hidden, weight, labels = draw(1 << 16, width=64, vocab=32_000, dtype=torch.bfloat16)
        hidden, weight = leaf(hidden), leaf(weight)
        blocks.LOGITS, before = 1 << 27, torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        linear_cross_entropy(hidden, weight, labels)[0].backward()
        assert torch.cuda.max_memory_allocated() - before < 1 << 30
