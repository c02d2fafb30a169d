"""Runs termination-handler until it drains its node, and prints how it called Nomad to do so."""
import json
import os
import pathlib
import sys

from termination_handler import termination_handler

room = pathlib.Path(os.environ["HOME"])
called, nomad = room / "called", room / "nomad"
nomad.write_text(f'#!/bin/sh\necho "$@" > {called}\n')
nomad.chmod(0o755)
os.environ["PATH"] = f"{room}:{os.environ['PATH']}"
sys.argv = ["termination-handler", "--nomad", "--step", "0.1"]
termination_handler.main()
print(json.dumps(called.read_text().split()))
