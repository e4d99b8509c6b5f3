"""Checks objects strictly against Kubernetes' schemas, and the schema of a chart's values.

    kubernetes_schemas.py OBJECTS CHART VERSION …

OBJECTS is a JSON file with lists of objects by name, CHART the folder of a chart. Prints the errors as a JSON list.
"""

import functools
import json
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils

utils.schema_contents = functools.cache(utils.schema_contents)  # It reads megabytes for each object.
utils.all_versions = functools.cache(utils.all_versions)
file, chart, *versions = sys.argv[1:]
wrong = []
for name, objects in json.loads(Path(file).read_text()).items():
    for one in objects:
        for version in versions:
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as exc:
                wrong.append(f"{name}: {version}: {one['kind']} {one['metadata']['name']}: {exc}")

schema = json.loads(Path(chart, "values.schema.json").read_text())
jsonschema.Draft7Validator.check_schema(schema)
values = yaml.safe_load(Path(chart, "values.yaml").read_text())
wrong += [f"values.yaml: {exc.message}" for exc in jsonschema.Draft7Validator(schema).iter_errors(values)]
sys.stdout.write(json.dumps(wrong))
