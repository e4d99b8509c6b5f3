"""Prints what an independent validator says about a list of OpenAPI documents. Argument: their file."""

import json
import sys
from pathlib import Path

from openapi_spec_validator import OpenAPIV31SpecValidator  # type: ignore[import-not-found]

documents = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
json.dump([str(error)[:2_000] for one in documents for error in OpenAPIV31SpecValidator(one).iter_errors()], sys.stdout)
