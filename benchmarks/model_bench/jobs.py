"""What is measured of a model: a step of training, prefill, a long stream, and decoding."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.models import AtlasCache
from atlas_lm.models.decoding import Decoder
from atlas_lm.stream import Stream
from benchmarks.kernel_bench.decode import BATCH, SIZE
from benchmarks.kernel_bench.measuring import Limits
from benchmarks.model_bench.clock import Clocked, Marks, clock, forget_peak, peak
from benchmarks.model_bench.families import Family, Model

WHAT = ("prefill", "stream", "decode", "train")  # training last: before it weights are as drawn
STRIDE = 16384  # of streams
STEPS = 16  # tokens of a timed run of decoding
RATE = 1e-5  # of AdamW


@dataclass(frozen=True)
class Plan:
    """Sizes of all jobs."""

    size: str = SIZE
    lengths: tuple[int, ...] = (4096, 32768, 131072)  # tokens of a row
    step: int = 32768  # tokens of a training step, where a row has fewer: more rows
    stream: int = 2**20
    batch: int = BATCH  # streams that are decoded side by side
    prompt: int = 128  # tokens that each of them begins with
    compiled: bool = False  # torch.compile joins small operations of decoding


@dataclass(frozen=True)
class Job:
    """One of WHAT. tokens: of each row; of decoding those that were read before."""

    what: str
    batch: int
    tokens: int


@dataclass(frozen=True)
class Done:
    """What was found. tokens: of a single run; whole: its rate is that of all runs together."""

    clocked: Clocked
    tokens: int
    whole: bool = False
    checkpointing: bool | None = None
    note: str = ""
    caution: str = ""  # why there is a time and no more


class Unfit(Exception):
    """This model has nothing to measure here."""


def jobs(plan: Plan, what: list[str] | None = None) -> list[Job]:
    """In the order of WHAT; what: some of it."""
    unknown = [name for name in what or () if name not in WHAT]
    if unknown:
        raise ValueError(f"what is {unknown[0]!r}, wanted some of {', '.join(WHAT)}")
    made = {
        "prefill": [Job("prefill", 1, length) for length in plan.lengths],
        "stream": [Job("stream", 1, plan.stream)],
        "decode": [Job("decode", plan.batch, plan.prompt)],
        "train": [Job("train", max(1, plan.step // n), n) for n in plan.lengths],
    }
    return [job for name in WHAT if what is None or name in what for job in made[name]]


def do(
    job: Job, family: Family, model: Model, device: torch.device, plan: Plan, limits: Limits
) -> Done:
    """Raises Unfit where the model cannot do this job by its nature."""
    if job.what == "train":
        return train(job, family, model, device, limits)
    with torch.no_grad():
        model.eval()
        if job.what == "prefill":
            return prefill(job, model, device, limits)
        if job.what == "stream":
            return stream(job, family, model, device)
        return decode(job, family, model, device, plan, limits)


def draw(job: Job, model: Model, device: torch.device) -> Tensor:
    """ids [batch, tokens], the same every time"""
    generator = torch.Generator(device).manual_seed(0)
    shape = (job.batch, job.tokens)
    return torch.randint(model.config.vocab_size, shape, generator=generator, device=device)


def train(job: Job, family: Family, model: Model, device: torch.device, limits: Limits) -> Done:
    """Forward, loss, backward and AdamW; with checkpointing where a step does not fit without."""
    try:
        return trained(job, family, model, device, limits, checkpointing=False)
    except torch.OutOfMemoryError:
        pass  # here what its frames hold is let go
    model.zero_grad()
    release(device)
    return trained(job, family, model, device, limits, checkpointing=True)


def trained(
    job: Job,
    family: Family,
    model: Model,
    device: torch.device,
    limits: Limits,
    *,
    checkpointing: bool,
) -> Done:
    losses: list[Tensor] = []
    step = training_step(job, family, model, device)
    with checkpointed(model, checkpointing):
        clocked = clock(lambda: losses.append(step()), device, limits)
    caution = family.caution() or ""
    if not math.isfinite(losses[-1].item()):
        caution = caution or f"the loss is {losses[-1].item()}"
    return Done(clocked, job.batch * job.tokens, checkpointing=checkpointing, caution=caution)


def training_step(
    job: Job, family: Family, model: Model, device: torch.device
) -> Callable[[], Tensor]:
    """A call is a whole step; it returns the loss, which stays on the device."""
    model.train()
    ids = draw(job, model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step() -> Tensor:
        loss: Tensor = model(ids, labels=ids, use_cache=False, **family.with_labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@contextmanager
def checkpointed(model: Model, on: bool) -> Iterator[None]:
    """on: activations inside blocks are computed again in the backward pass."""
    if not on:
        yield
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


def prefill(job: Job, model: Model, device: torch.device, limits: Limits) -> Done:
    """Read a prompt: state or cache, and the logits of its last token."""
    ids = draw(job, model, device)
    clocked = clock(lambda: model(ids, use_cache=True, logits_to_keep=1), device, limits)
    return Done(clocked, ids.numel())


def stream(job: Job, family: Family, model: Model, device: torch.device) -> Done:
    """Read on and on in strides, memory constant; once, its quartiles over strides."""
    if not family.ours:
        raise Unfit("a stream wants a model of this project")
    if model.config.grows:
        raise Unfit(f"with {model.config.grows} the state grows with the stream")
    stride = min(STRIDE, job.tokens)
    ids = draw(job, model, device)[0].cpu()
    reader = Stream(model, stride=stride, history=1)
    # a full stride is read when more comes: after these two are read, and one token waits
    for _ in range(2):
        reader.absorb(ids[:stride])
    reader.absorb(ids[:1])
    forget_peak(device)
    marks = Marks(device)
    reader.absorb(ids, progress=lambda _: marks.take())
    # the first mark stands at a border; between all others a stride is read
    clocked = Clocked(marks.seconds(), peak=peak(device))
    return Done(clocked, stride, whole=True, note=f"strides of {stride:,}")


def decode(
    job: Job, family: Family, model: Model, device: torch.device, plan: Plan, limits: Limits
) -> Done:
    """The likeliest token of each stream, one after another, after a prompt."""
    prompt = draw(job, model, device)
    how = steps_of_ours if family.ours else steps_of_peers
    say_next, ids, form = how(model, prompt, plan)

    def run() -> None:
        nonlocal ids
        for _ in range(STEPS):
            ids = say_next(ids)

    return Done(clock(run, device, limits), job.batch * STEPS, note=form)


Steps = tuple[Callable[[Tensor], Tensor], Tensor, str]


def steps_of_ours(model: Model, prompt: Tensor, plan: Plan) -> Steps:
    """The step from ids [B] to the next ones, the first of them, and how it is done."""
    cache = AtlasCache()
    logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    assert cache.state is not None
    decoder = Decoder(model, cache.state, compiled=plan.compiled)

    def say_next(ids: Tensor) -> Tensor:
        return decoder.step(ids).argmax(-1)

    joined = ", compiled" if plan.compiled and decoder.form == "graphs" else ""
    return say_next, logits[:, -1].argmax(-1), decoder.form + joined


def steps_of_peers(model: Model, prompt: Tensor, plan: Plan) -> Steps:
    """The same by calling the model, its cache in hand, as `generate` does."""
    said = model(prompt, use_cache=True, logits_to_keep=1)

    def say_next(ids: Tensor) -> Tensor:
        nonlocal said
        said = model(ids[:, None], past_key_values=said.past_key_values, use_cache=True)
        return said.logits[:, -1].argmax(-1)

    return say_next, said.logits[:, -1].argmax(-1), "plain"


def release(device: torch.device) -> None:
    """Give memory of the device back that nobody holds any more."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
