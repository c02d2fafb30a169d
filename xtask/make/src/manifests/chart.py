"""Renders and lints a chart: {"files": {path: text}, "values": {…}} in, {"rendered": {path: text}, "lint": […]} out."""
import json, os, sys, tempfile
import helm_python as helm

given = json.load(sys.stdin)
with tempfile.TemporaryDirectory() as room:
    top = os.path.join(room, "xdp-imds")
    for path, text in given["files"].items():
        os.makedirs(os.path.dirname(os.path.join(top, path)), exist_ok=True)
        with open(os.path.join(top, path), "w") as file:
            file.write(text)
    rendered = helm.Chart.load(top).render(given["values"], name="xdp-imds", namespace="default")
    lint = helm.lint(top, given["values"], strict=True, namespace="default")
# 1 is «icon is recommended» and its like.
messages = [message for message in lint["messages"] if message["severity"] > 1]
json.dump({"rendered": rendered, "lint": messages + lint["errors"]}, sys.stdout)
