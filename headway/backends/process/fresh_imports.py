"""Imports of user code from its source, never from cached bytecode; in the child process, apart from what calls the code.

Python trusts cached bytecode if the source has the size and modification time, in whole seconds, that it was
made from. So a file saved twice within a second would be loaded in its first form. Installed packages and Python's own
library keep their bytecode: they are large, and nobody edits them while they are served.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed.importlib import PathEntryFinderProtocol

INSTALLED = ("site-packages", "dist-packages")
"""Names of the folders of installed packages."""


class SourceLoader(SourceFileLoader):
    """Loader of a file's source that ignores bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module now."""
        return self.source_to_code(self.get_data(self.path), self.path)


def import_from_source(folder: str) -> None:
    """Import modules in `folder`, and in packages below it, by SourceLoader from now on."""
    root = os.path.join(os.path.realpath(folder), "")  # noqa: PTH118
    library = os.path.join(os.path.realpath(os.path.dirname(os.__file__)), "")  # noqa: PTH118, PTH120
    make = FileFinder.path_hook(
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (SourceLoader, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )

    def within(path: str) -> bool:
        place = os.path.join(os.path.realpath(path), "")  # noqa: PTH118
        if not place.startswith(root) or place.startswith(library):
            return False
        return not any(f"{os.sep}{name}{os.sep}" in place for name in INSTALLED)

    def hook(path: str) -> PathEntryFinderProtocol:
        if not within(path):
            raise ImportError(path)
        return make(path)

    sys.path_hooks.insert(0, hook)
    for path in [path for path in sys.path_importer_cache if within(path)]:
        del sys.path_importer_cache[path]
