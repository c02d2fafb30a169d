"""Renders and lints a chart.

Reads {"files": {path: text}, "values": {…}} and prints {"rendered": {path: text}, "lint": […]}.
"""
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
# Severity 1 is advice, such as «icon is recommended».
messages = [message for message in lint["messages"] if message["severity"] > 1]
json.dump({"rendered": rendered, "lint": messages + lint["errors"]}, sys.stdout)
