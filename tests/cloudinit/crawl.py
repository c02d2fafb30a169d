"""Crawls with one unmodified datasource class of cloud-init, and prints the result as one JSON document.

    crawl.py CLASS MACHINE DIRECTORY
    crawl.py DIRECTORY

The second form reads lines `[CLASS, MACHINE]` from standard input. It crawls for each in a process of its own, which
has cloud-init's modules already, and prints one line. CLASS is the class name without its prefix: `OpenStackLocal` is DataSourceOpenStack.DataSourceOpenStackLocal.
DIRECTORY holds cloud-init's state. MACHINE is a JSON document that describes the machine to the class:

    dmi     firmware values under dmidecode's names; other names have no value
    config  cloud-init's own configuration, as in /etc/cloud/cloud.cfg
    lease   the DHCP lease, under dhclient's names
    files   files of the image, by their path below DIRECTORY

`@DIRECTORY@` in MACHINE stands for DIRECTORY.

The kernel command line is empty, there are no disks to search, and a tap counts as a real NIC. The script records
every sleep, which still takes its full time, and every HTTP request.
"""
import base64
import http.client
import importlib
import json
import logging
import os
import sys
import time

# A crawl that has slept this long has failed, so do not wait for the datasource's full time-out.
SLEPT_ENOUGH_SECONDS = 8

sleeps = []
requests = []
warnings = []


class GivenUp(BaseException):
    """Not an Exception, so no `except Exception` of a datasource catches it."""


class Warnings(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())


def watch_sleep(sleep):
    def watched(seconds):
        sleeps.append(seconds)
        if sum(sleeps) > SLEPT_ENOUGH_SECONDS:
            raise GivenUp(f"after {sum(sleeps)} s of sleep")
        sleep(seconds)

    return watched


def watch_http(connection):
    putrequest, getresponse = connection.putrequest, connection.getresponse

    def watched_putrequest(self, method, url, *args, **kwargs):
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == 80 else f":{self.port}"
        self.watched = {"request": f"{method} {host}{port}{url}", "status": 0}
        requests.append(self.watched)
        return putrequest(self, method, url, *args, **kwargs)

    def watched_getresponse(self, *args, **kwargs):
        response = getresponse(self, *args, **kwargs)
        self.watched["status"] = response.status
        return response

    connection.putrequest, connection.getresponse = watched_putrequest, watched_getresponse


# These names must be replaced before cloud-init's modules import them.
time.sleep = watch_sleep(time.sleep)
watch_http(http.client.HTTPConnection)

from cloudinit import distros, dmi, helpers, util, version  # noqa: E402
from cloudinit.distros import networking  # noqa: E402
from cloudinit.net import dhcp, ephemeral  # noqa: E402

logging.getLogger().addHandler(Warnings(logging.WARNING))


def no_disk(device, *_args, **_kwargs):
    raise util.MountFailedError(f"there is no {device} here")


def replace_dhcp(lease):
    def discovery(*_args, **_kwargs):
        # cloud-init 23.4 and later return one lease, earlier versions a list.
        return dict(lease) if hasattr(dhcp, "IscDhclient") else [dict(lease)]

    def option(key, *_args, **_kwargs):
        return lease.get("dhcp-server-identifier") if key == "SERVER_ADDRESS" else None

    ephemeral.maybe_perform_dhcp_discovery = discovery
    dhcp.networkd_get_option_from_leases = option
    if not hasattr(dhcp, "IscDhclient"):
        return

    class Client(dhcp.IscDhclient):
        client_name = "lease"

        def __init__(self):
            """Unlike the parent class, needs no DHCP client program."""

        def get_newest_lease(self, *_args):
            return dict(lease)

    distros.Distro.dhcp_client = property(lambda self: Client())


def replace_machine(machine):
    dmi.read_dmi_data = machine["dmi"].get
    util.get_cmdline = lambda: ""
    util.find_devs_with = lambda *_args, **_kwargs: []
    util.mount_cb = no_disk
    networking.LinuxNetworking.is_physical = lambda self, name: name != "lo"
    replace_dhcp(machine["lease"])


def bytes(data):
    if data is None:
        data = b""
    if isinstance(data, (dict, list)):
        data = json.dumps(data)
    if isinstance(data, str):
        data = data.encode()
    return base64.b64encode(data).decode()


def module_of(name):
    # The class name is the module's name and the stage of the boot.
    stem = name.removesuffix("Local").removesuffix("Net")
    return importlib.import_module(f"cloudinit.sources.DataSource{stem}")


def datasource(name, config, directory):
    module = module_of(name)
    paths = helpers.Paths({"cloud_dir": directory, "run_dir": directory})
    distro = distros.fetch("debian")("debian", config.get("system_info", {}), paths)
    return getattr(module, f"DataSource{name}")(config, distro, paths)


def network_config(source):
    try:
        return json.loads(json.dumps(source.network_config)), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def write(files, directory):
    for path, text in files.items():
        path = os.path.join(directory, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def crawl(name, machine, directory):
    replace_machine(machine)
    write(machine["files"], directory)
    source = datasource(name, machine["config"], directory)
    started = time.monotonic()
    try:
        found, trouble = bool(source.get_data()), ""
    except (Exception, GivenUp) as error:
        found, trouble = False, f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    report = {
        "version": version.version_string(),
        "datasource": type(source).__name__,
        "found": found,
        "trouble": trouble,
        "seconds": seconds,
    }
    if found:
        hostname = source.get_hostname()
        network, network_trouble = network_config(source)
        report |= {
            "metadata": json.loads(json.dumps(source.metadata, default=str)),
            "instance_id": str(source.get_instance_id()),
            "hostname": str(getattr(hostname, "hostname", hostname)),
            "ssh_keys": list(source.get_public_ssh_keys()),
            "user_data": bytes(source.get_userdata_raw()),
            "vendor_data": bytes(source.get_vendordata_raw()),
            "own_config": source.get_config_obj() or {},
            "network": network,
            "network_trouble": network_trouble,
        }
    # Read these last, because the calls above may send requests and sleep.
    return report | {"sleeps": sleeps, "requests": requests, "warnings": warnings}


def report(name, machine, directory):
    machine = json.loads(machine.replace("@DIRECTORY@", directory))
    print(json.dumps(crawl(name, machine, directory)), flush=True)
    # Do not wait for threads that still try the slower of two addresses.
    os._exit(0)


def report_in_child(name, machine, directory):
    os.mkdir(directory)
    if os.fork() == 0:
        try:
            report(name, machine, directory)
        finally:
            os._exit(1)
    if os.wait()[1] != 0:
        # The reader waits for a line. The exception is on standard error.
        print(flush=True)


if len(sys.argv) == 4:
    report(*sys.argv[1:])
for number, line in enumerate(sys.stdin):
    name, machine = json.loads(line)
    module_of(name)
    report_in_child(name, json.dumps(machine), os.path.join(sys.argv[1], f"crawl-{number}"))
