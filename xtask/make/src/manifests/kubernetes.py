"""Holds objects to a version's schemas: {"version": …, "objects": […]} in; out, for each, null or what is wrong."""
import json, sys
import kubernetes_validate as schemas

given = json.load(sys.stdin)
said = []
for thing in given["objects"]:
    try:
        schemas.validate(thing, given["version"], strict=True)
        said.append(None)
    except schemas.SchemaNotFoundError:
        said.append("no schema")
    except schemas.ValidationError as error:
        said.append("%s: %s" % (".".join(str(part) for part in error.path), error.message))
json.dump(said, sys.stdout)
