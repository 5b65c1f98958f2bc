"""`atlas eval`: the benchmarks of this field on a model, streamed, resumable, with intervals."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_lm.cli.common import fail
from atlas_lm.cli.conversing import Device
from atlas_lm.cli.progress import progress

if TYPE_CHECKING:
    from atlas_lm.evaluate.reader import Reader
    from atlas_lm.evaluate.runner import Outcome
    from atlas_lm.evaluate.task import Sample, Task

INTERRUPTED = 130


def evaluate(
    tasks: Annotated[
        list[str],
        typer.Argument(help="Tasks, e.g. babilong, ruler/single_1, hellaswag; `list` lists them."),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Folder of a model, a .gguf file, or a name on the Hugging Face hub."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder for records, table and pictures; an unfinished run goes on."),
    ] = Path("eval_output"),
    lengths: Annotated[
        str | None, typer.Option(help="Lengths in GPT-2 tokens, e.g. 0k,4k,128k,1M,10M.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples of each cell. [default: the task's own]")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples side by side.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    style: Annotated[
        str | None,
        typer.Option(help="published or plain (babilong), sentences or letters (robustness)."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the model's chat template.")] = False,
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Leave out the middle of what is too long, and mark it."),
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="Only the samples of data that come with the package.")
    ] = False,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per call of the model. [default: 512; 2048 if not ours]"),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the model takes. [default: by its configuration]"),
    ] = None,
    device: Device = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: float32, bfloat16, float16.")
    ] = None,
    show: Annotated[
        str | None,
        typer.Option(help="Print the exact prompt of one sample, e.g. babilong/qa1/4k/17."),
    ] = None,
) -> None:
    """Examine a model. Contexts are streamed and never cut in silence; a killed run goes on where it was.

    Examples:

        atlas eval list

        atlas eval babilong --model my-model --lengths 0k,4k,128k --samples 20

        atlas eval hellaswag piqa --model HuggingFaceTB/SmolLM2-135M --out smollm
    """
    if tasks == ["list"]:
        _list()
        return
    try:
        from atlas_lm.data.library import Library
        from atlas_lm.evaluate.tasks.options import Options

        options = Options(
            lengths=None if lengths is None else tuple(lengths.split(",")),
            count=samples,
            seed=seed,
            split=split,
            style=style,
            library=Library(small=small),
        )
        opening = {
            "device": device,
            "dtype": dtype,
            "stride": stride,
            "limit": limit,
            "truncate": truncate,
        }
        reader, chosen = _open(tasks, model, options, chat, opening)
        if show is not None:
            typer.echo(_prompt(chosen, reader, show))
            return
        outcome = _run(chosen, reader, out, batch)
    except KeyboardInterrupt:
        done = f"{out} holds what was done, and the same command goes on"
        fail("eval", f"stopped; {done if out.exists() else 'nothing was done yet'}", INTERRUPTED)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail("eval", error)
    _print(outcome)
    for told in _samples_told(chosen):
        typer.echo(told)
    typer.echo(f"\nrecords, table and pictures: {out}")
    if not outcome.rows:
        raise typer.Exit(2)


def _samples_told(tasks: "list[Task]") -> list[str]:
    """Of each task that was asked on the small samples of the package: that it was."""
    return [
        f"{task.name}: {description}"
        for task in tasks
        for description, _ in task.settings.get("data", {}).values()
        if description.startswith("sample")
    ]


def _open(
    names: list[str], model: str | None, options: Any, chat: bool, opening: dict[str, Any]
) -> "tuple[Reader, list[Task]]":
    """The model as a reader, and the tasks for it."""
    from atlas_lm.cli.models import open_any
    from atlas_lm.evaluate import registry
    from atlas_lm.evaluate.opening import open_reader

    registry.build(names, options)  # a mistake in their names should not wait for the model
    if model is None:
        raise ValueError(
            "no model is named; give --model, a folder, a .gguf file or a name on the hub"
        )
    opened, tokenizer = open_any(model, opening.pop("device"), opening.pop("dtype"))
    name = Path(model).resolve().name
    reader = open_reader(opened, tokenizer, name=name, chat=chat, **opening)
    return reader, registry.build(names, options, reader.chat_text if chat else None)


def _run(tasks: "list[Task]", reader: "Reader", out: Path, batch: int) -> "Outcome":
    from atlas_lm.evaluate.results import evaluate as run

    total = sum(sample.tokens for task in tasks for sample in task.samples())
    with progress(total) as tell:

        def tell_tokens(task: "Task", sample: "Sample", tokens: float) -> None:
            tell(" ".join([task.name, *sample.cell.values()]), tokens)

        return run(tasks, reader, out, batch=batch, tell=tell_tokens)


def _print(outcome: "Outcome") -> None:
    from rich.console import Console
    from rich.table import Table

    from atlas_lm.evaluate.report import refusal_text, tables

    console = Console()
    for made in tables(outcome.rows):
        table = Table(*made.header, title=made.title, caption=made.below, title_justify="left")
        for line in made.lines:
            table.add_row(*line)
        console.print(table)
    for refusal in outcome.refusals:
        console.print(f"refused: {refusal_text(refusal)}", style="yellow", markup=False)


def _list() -> None:
    from atlas_lm.evaluate.registry import DESCRIPTIONS

    width = max(map(len, DESCRIPTIONS))
    for name, told in DESCRIPTIONS.items():
        typer.echo(f"{name:{width}}  {told}")


def _prompt(tasks: "list[Task]", reader: "Reader", wanted: str) -> str:
    """What the model is told of one sample."""
    for task in tasks:
        if wanted not in {sample.id for sample in task.samples()}:
            continue
        if not hasattr(task, "show"):
            raise ValueError(f"{task.name} has no prompts: its samples are rows of tokens or texts")
        [sample] = [sample for sample in task.samples() if sample.id == wanted]
        return str(task.show(reader, sample))
    raise ValueError(f"no sample of these tasks is called {wanted!r}; records.jsonl has the names")
