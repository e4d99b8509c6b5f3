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
    """Turns each text around. Put your model in its place."""

    def setup(self, device: str) -> None:
        """Load what is needed, once in each worker. `device` is the GPU that it may use, or "cpu"."""
        self.step = -1

    def __call__(self, inputs: list[str]) -> list[str | Exception]:
        """Return as many outputs as there are inputs, in their order; annotated `list[Any]`, they are JSON values.

        An exception in one place refuses that input; one that is raised fails the whole batch.
        """
        return [self.one(text) for text in inputs]

    def one(self, text: str) -> str | Exception:
        return text[:: self.step] if text else ValueError("the text is empty")
'''

TEST = '''"""Answers of the model, in batches as they are formed in service."""

from __future__ import annotations

from headway.client import RejectedByModel
from headway.testing import batched

from model import Model


def test_each_input_gets_its_own_output() -> None:
    with batched(Model, max_batch_size=2) as run:
        assert run.many(["one", "two", "three"]) == ["eno", "owt", "eerht"]
        assert run.batches == [["one", "two"], ["three"]]


def test_an_input_that_is_refused_costs_the_others_nothing() -> None:
    with batched(Model) as run:
        good, refused = run.many(["one", ""], return_errors=True)
        assert good == "eno"
        assert isinstance(refused, RejectedByModel)


if __name__ == "__main__":
    test_each_input_gets_its_own_output()
    test_an_input_that_is_refused_costs_the_others_nothing()
    print("all right")
'''

NUMPY_MODEL = '''"""The model that is served: one instance in each worker process."""

from __future__ import annotations

import numpy as np


class Model:
    """Weighs four numbers for each of three classes. Put your model in its place."""

    example = np.zeros(4, np.float32)  # One row: its datatype and shape are what clients may send.

    def setup(self, device: str) -> None:
        """Load what is needed, once in each worker. `device` is the GPU that it may use, or "cpu"."""
        self.weights = np.arange(12, dtype=np.float32).reshape(4, 3)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Return as many rows as there are in the batch, in their order. An exception fails the whole batch."""
        return rows @ self.weights
'''

NUMPY_TEST = '''"""Answers of the model, in batches as they are formed in service."""

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
# Settings of the commands that are run in this folder. `headway serve --help-all` lists them all.
# A flag beats the environment (HEADWAY_MAX_BATCH_SIZE), which beats this file.

model = "{name}"          # name under which it is served
max_batch_size = 32       # largest batch that the model takes; `headway check model.py:Model` tries it
# workers = 2             # worker processes, one for each GPU
# request_timeout_ms = 4000
"""

NEXT = """\
Next:
{enter}{install}  python3 test_model.py                # tries the model in batches; so does pytest, after: pip install pytest
  headway check model.py:Model         # loads it, and says what a batch costs
  headway serve model.py:Model         # serves it, and prints a line to try"""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class InitError(HeadwayError):
    """The files cannot be written."""


@command()
@click.argument("name", metavar="NAME", help="Folder to make; its last part names the model.")
@click.option("--numpy", is_flag=True, help="The target takes and gives arrays of numbers; it needs numpy.")
def init(name: str, numpy: bool) -> None:
    """Make a folder NAME with a target, a test of it and a settings file to start from.

    headway init shop

    headway init iris --numpy

    Nothing that is there is overwritten. What to run next is printed.

    Exit codes: 0 done, 1 a file is there already, or the folder cannot be written.
    """
    folder = Path(name)
    model = folder.resolve().name
    if not _NAME.fullmatch(model):
        raise InitError(f"NAME {name!r}: the model gets this name, of letters, digits or -_. only. Choose another.")
    target, test = (NUMPY_MODEL, NUMPY_TEST) if numpy else (MODEL, TEST)
    files = {"model.py": target, "test_model.py": test, "headway.toml": SETTINGS.replace("{name}", model)}
    _write(folder, files)
    click.echo(f"Made in {name}: {', '.join(files)}")
    enter = "" if folder.resolve() == Path.cwd() else f"  cd {name}\n"
    install = "  pip install numpy                    # which the model and its test need\n" if numpy else ""
    click.echo(NEXT.format(enter=enter, install=install))


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        taken = [file for file in files if (folder / file).exists() or (folder / file).is_symlink()]
        if taken:
            there, hint = "is" if len(taken) == 1 else "are", "Choose another NAME, or move what is there."
            raise InitError(f"{folder}: {', '.join(taken)} {there} there already; nothing was written. {hint}")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            with (folder / file).open("x", encoding="utf-8") as new:
                new.write(text)
    except OSError as exc:
        raise InitError(f"{exc.filename or folder}: {exc.strerror}. Choose another NAME, or correct that.") from None
