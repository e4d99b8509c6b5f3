"""Path to the code that `protoc` has made of `headway/v1/inference.proto`, wherever a program keeps it on `sys.path`.

Without this, Python would look for a package of this name only below Headway's own.
"""

import sys
from pathlib import Path

_PLACES = (Path(entry).absolute() / "headway" / "v1" for entry in sys.path)
__path__ += [str(place) for place in _PLACES if place.is_dir()]
