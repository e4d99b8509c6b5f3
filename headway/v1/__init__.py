"""Finds the code that a program's `protoc` has generated from `headway/v1/inference.proto`, anywhere on `sys.path`.

Without this module, Python would look for `headway.v1` only in Headway's own directory.
"""

import sys
from pathlib import Path

_PLACES = (Path(entry).absolute() / "headway" / "v1" for entry in sys.path)
__path__ += [str(place) for place in _PLACES if place.is_dir()]
