"""Checks objects against the schemas of a Kubernetes version.

Reads {"version": …, "objects": […]} and prints a list that has null or an error message for each object.
"""
import json, sys
import kubernetes_validate as schemas

given = json.load(sys.stdin)
errors = []
for item in given["objects"]:
    try:
        schemas.validate(item, given["version"], strict=True)
        errors.append(None)
    except schemas.SchemaNotFoundError:
        errors.append("no schema")
    except schemas.ValidationError as error:
        errors.append("%s: %s" % (".".join(str(part) for part in error.path), error.message))
json.dump(errors, sys.stdout)
