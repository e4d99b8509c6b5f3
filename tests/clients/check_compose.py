"""What the compose specification's schema says of a file: its services, each with what it has, as JSON.

python check_compose.py FILE
"""

import json
import sys
from pathlib import Path

from compose_viz.spec.compose_spec import ComposeSpecification  # type: ignore[import-not-found]
from ruamel.yaml import YAML  # type: ignore[import-not-found]

found = YAML(typ="safe").load(Path(sys.argv[1]).read_text(encoding="utf-8"))
# Those of its own, which the schema allows by a pattern, and these classes do not know.
found = {name: value for name, value in found.items() if not name.startswith("x-")}
ComposeSpecification.model_validate(found)
sys.stdout.write(json.dumps(found))
