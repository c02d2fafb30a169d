"""Renders network documents with the unmodified renderers of cloud-init, and prints what the files mean.

    render.py FILE

Reads one JSON document from FILE: {"renderers": [NAME...], "cases": [{"client", "document", "macs"}...]}.
`client` says how a datasource makes its network configuration of the document that it fetched; `macs` maps the MAC
of each of the machine's NICs to its name. Prints one line for each case: a list with one outcome for each renderer,
{"meaning": ...}, {"trouble": TEXT}, or {"is_absent": true} if the release has no such renderer. The first line is cloud-init's version.

A meaning has one entry for each device, as `empty_device` makes it, and the resolvers and search domains of all.
The readers accept only what cloud-init writes. They refuse all else, so that nothing is overlooked.
"""
import copy
import json
import logging
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from cloudinit import net, util, version  # noqa: E402
from cloudinit.net import network_state, renderers  # noqa: E402

from clients import CLIENTS  # noqa: E402
from meaning import READERS  # noqa: E402

# One directory for all, because making and removing one for each takes a third of the time.
DIRECTORY = os.path.realpath(tempfile.mkdtemp())
MODULES = {"network-manager": "network_manager"}
WRITE_FILE = util.write_file
# The configuration that a distribution of each renderer gives it.
DISTRIBUTIONS = {"sysconfig": "rhel", "eni": "debian", "netplan": "debian"}


class Complaints(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


complaints = Complaints()
logging.getLogger().addHandler(complaints)


def renderer(name):
    module = __import__(f"cloudinit.net.{MODULES.get(name, name)}", fromlist=["Renderer"])
    config = {}
    if name in DISTRIBUTIONS:
        distro = __import__(f"cloudinit.distros.{DISTRIBUTIONS[name]}", fromlist=["Distro"])
        config = copy.deepcopy(distro.Distro.renderer_configs[name])
        # Commands, absolute paths and the look for netplan's features would reach this machine.
        config |= {"postcmds": False, "features": ["none"]}
        config = {key: text.lstrip("/") if isinstance(text, str) else text for key, text in config.items()}
    return module.Renderer(config)


def render(name, config, directory):
    rendering = renderer(name)
    state = network_state.parse_net_config_data
    # Releases since 22.4 pass the renderer.
    try:
        state = state(config, renderer=rendering)
    except TypeError as error:
        if "renderer" not in str(error):
            raise
        state = state(config)
    if state is None:
        raise ValueError("cloud-init finds no network configuration in the document")
    rendering.render_network_state(state, target=directory)


def files(directory):
    """Takes all files out of the directory."""
    found = {}
    for at, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(at, name)
            with open(path, encoding="utf-8") as file:
                found[os.path.relpath(path, directory)] = file.read()
            os.unlink(path)
    return found


def confine(directory):
    def write_file(filename, *args, **kwargs):
        if not os.path.realpath(filename).startswith(directory):
            raise AssertionError(f"{filename} is a file of this machine")
        return WRITE_FILE(filename, *args, **kwargs)

    util.write_file = write_file


def outcome(name, case):
    if name not in renderers.NAME_TO_RENDERER:
        return {"is_absent": True}
    net.get_interfaces_by_mac = lambda *_args, **_kwargs: dict(case["macs"])
    found = {}
    complaints.texts.clear()
    try:
        config = CLIENTS[case["client"]](case["document"], case["macs"])
        render(name, copy.deepcopy(config), DIRECTORY)
        found = files(DIRECTORY)
        return {"meaning": READERS[name](found), "files": found}
    except Exception as error:
        files(DIRECTORY)
        return {"trouble": f"{type(error).__name__}: {error}", "files": found}


def main():
    # The machine that runs the test has no such user, and its own devices do not matter.
    util.chownbyname = lambda *_args: None
    net.get_devicelist = lambda: []
    # It is a text for the log, and takes most of the time.
    network_state.NetworkStateInterpreter.dump_network_state = lambda *_args: ""
    confine(DIRECTORY)
    print(json.dumps(version.version_string()), flush=True)
    with open(sys.argv[1], encoding="utf-8") as file:
        asked = json.load(file)
    for case in asked["cases"]:
        print(json.dumps([outcome(name, case) for name in asked["renderers"]]), flush=True)


main()
