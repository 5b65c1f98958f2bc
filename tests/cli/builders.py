"""The command line from inside: a tiny model in a folder, and a way to call."""

import hashlib
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from atlas_lm.cli.main import app

LINES = "".join(f"Line {i} tells nothing new, not even tö you.\n" for i in range(60))


def atlas(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments], input=stdin)


def make_model(folder: Path, *options: object) -> Path:
    result = atlas("new", folder, "--preset", "gated_deltanet", "--block", "mag", *options)
    assert result.exit_code == 0, result.stderr
    return folder


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
