"""`headway init`: write a target to start from, with its test and settings."""

from __future__ import annotations

import re
from pathlib import Path

import click

from headway.cli.commands import command
from headway.errors import HeadwayError

MODEL = '''"""The model that is served: one instance in each worker process."""

from __future__ import annotations


class Model:
    """Reverses each text. Replace it with your model."""

    def setup(self, device: str) -> None:
        """Load the model, once in each worker. `device` is the GPU that the worker may use, or "cpu"."""
        self.step = -1

    def __call__(self, inputs: list[str]) -> list[str | Exception]:
        """Return one output for each input, in their order. Outputs annotated as `list[Any]` are JSON values.

        An exception in the list rejects only its own input. Raising an exception fails the whole batch.
        """
        return [self.reverse(text) for text in inputs]

    def reverse(self, text: str) -> str | Exception:
        return text[:: self.step] if text else ValueError("the text is empty")
'''

TEST = '''"""Tests for the model, in batches such as Headway would form."""

from __future__ import annotations

from headway.client import RejectedByModel
from headway.testing import batched

from model import Model


def test_each_input_gets_its_own_output() -> None:
    with batched(Model, max_batch_size=2) as run:
        assert run.many(["one", "two", "three"]) == ["eno", "owt", "eerht"]
        assert run.batches == [["one", "two"], ["three"]]


def test_a_refused_input_does_not_affect_the_others() -> None:
    with batched(Model) as run:
        good, refused = run.many(["one", ""], return_errors=True)
        assert good == "eno"
        assert isinstance(refused, RejectedByModel)


if __name__ == "__main__":
    test_each_input_gets_its_own_output()
    test_a_refused_input_does_not_affect_the_others()
    print("all right")
'''

NUMPY_MODEL = '''"""The model that is served: one instance in each worker process."""

from __future__ import annotations

import numpy as np


class Model:
    """Computes scores for three classes from four numbers. Replace it with your model."""

    example = np.zeros(4, np.float32)  # One row. Rows from clients must have its datatype and shape.

    def setup(self, device: str) -> None:
        """Load the model, once in each worker. `device` is the GPU that the worker may use, or "cpu"."""
        self.weights = np.arange(12, dtype=np.float32).reshape(4, 3)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Return one row of output for each row of the batch, in their order. An exception fails the whole batch."""
        return rows @ self.weights
'''

NUMPY_TEST = '''"""Tests for the model, in batches such as Headway would form."""

from __future__ import annotations

from headway.testing import batched

from model import Model

FIRST, LAST = [1, 0, 0, 0], [0, 0, 0, 1]


def test_each_row_gets_its_own_output() -> None:
    with batched(Model, max_batch_size=2) as run:
        assert run.many([FIRST, LAST, FIRST]) == [[0, 1, 2], [9, 10, 11], [0, 1, 2]]


def test_a_request_may_have_several_rows() -> None:
    with batched(Model) as run:
        assert run([FIRST, LAST]) == [[0, 1, 2], [9, 10, 11]]


if __name__ == "__main__":
    test_each_row_gets_its_own_output()
    test_a_request_may_have_several_rows()
    print("all right")
'''

SETTINGS = """\
# Settings for commands that you run in this folder. `headway serve --help-all` lists all settings.
# A flag overrides the environment (HEADWAY_MAX_BATCH_SIZE), which overrides this file.

model = "{name}"          # name of the model in requests
max_batch_size = 32       # largest batch that the model accepts; `headway check model.py:Model` tries it
# workers = 2             # worker processes, one for each GPU
# request_timeout_ms = 4000
"""

NEXT = """\
Next:
{enter}{install}  python3 test_model.py                # tests the model in batches; pytest runs the tests, too
  headway check model.py:Model         # loads the model, and measures how long batches take
  headway serve model.py:Model         # serves the model, and prints a command to try"""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class InitError(HeadwayError):
    """The files cannot be written."""


@command()
@click.argument("name", metavar="NAME", help="Folder to make. The last part of its path becomes the name of the model.")
@click.option("--numpy", is_flag=True, help="Make a target that takes and returns numpy arrays.")
def init(name: str, numpy: bool) -> None:
    """Make a folder NAME with a target, its test and a settings file to start from.

    headway init shop

    headway init iris --numpy

    The command never overwrites a file. It prints what to run next.

    Exit codes: 0 done, 1 a file already exists, or the folder cannot be written.
    """
    folder = Path(name)
    model = folder.resolve().name
    if not _NAME.fullmatch(model):
        raise InitError(f"NAME {name!r}: a model name may only contain letters, digits, - and _. Choose another.")
    target, test = (NUMPY_MODEL, NUMPY_TEST) if numpy else (MODEL, TEST)
    files = {"model.py": target, "test_model.py": test, "headway.toml": SETTINGS.replace("{name}", model)}
    _write(folder, files)
    click.echo(f"Made in {name}: {', '.join(files)}")
    enter = "" if folder.resolve() == Path.cwd() else f"  cd {name}\n"
    install = "  pip install numpy                    # the model and its test need it\n" if numpy else ""
    click.echo(NEXT.format(enter=enter, install=install))


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        taken = [file for file in files if (folder / file).exists() or (folder / file).is_symlink()]
        if taken:
            hint = "Choose another NAME, or move these files."
            raise InitError(f"{folder}: already there: {', '.join(taken)}. Nothing was written. {hint}")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            with (folder / file).open("x", encoding="utf-8") as new:
                new.write(text)
    except OSError as exc:
        raise InitError(f"{exc.filename or folder}: {exc.strerror}. Choose another NAME, or fix this.") from None
