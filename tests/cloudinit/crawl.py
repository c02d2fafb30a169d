"""Crawls a NoCloud seed with the unmodified datasource class, and prints what it got as one JSON document.

    crawl.py SEED DIRECTORY

SEED is what the machine's firmware would name (`http://169.254.169.254/v1/`); DIRECTORY is where cloud-init may
keep its state. Two things of the machine are replaced, neither of them the datasource's: the serial number in
its firmware tables names SEED, and its kernel command line is empty. Two are watched: every sleep, which is
still slept in full, and every HTTP request.
"""
import base64
import http.client
import json
import sys
import time

from cloudinit import distros, dmi, helpers, util, version
from cloudinit.sources import DataSourceNoCloud

sleeps = []
requests = []


def watch_sleep(sleep):
    def watched(seconds):
        sleeps.append(seconds)
        sleep(seconds)

    return watched


def watch_request(putrequest):
    def watched(self, method, url, *args, **kwargs):
        requests.append(f"{method} {url}")
        return putrequest(self, method, url, *args, **kwargs)

    return watched


def octets(data):
    if data is None:
        data = b""
    if isinstance(data, str):
        data = data.encode()
    return base64.b64encode(data).decode()


def crawl(seed, directory):
    serial = f"ds=nocloud-net;s={seed}"
    dmi.read_dmi_data = lambda key: serial if key == "system-serial-number" else None
    util.get_cmdline = lambda: ""
    time.sleep = watch_sleep(time.sleep)
    http.client.HTTPConnection.putrequest = watch_request(http.client.HTTPConnection.putrequest)

    paths = helpers.Paths({"cloud_dir": directory, "run_dir": directory})
    distro = distros.fetch("debian")("debian", {}, paths)
    # Without a label it does not look through this machine's own disks for a seed.
    config = {"datasource": {"NoCloud": {"fs_label": None}}}
    source = DataSourceNoCloud.DataSourceNoCloudNet(config, distro, paths)
    found = source.get_data()
    return {
        "version": version.version_string(),
        "found": bool(found),
        "datasource": type(source).__name__,
        "metadata": source.metadata if found else {},
        "instance_id": str(source.get_instance_id()) if found else "",
        "hostname": str(getattr(source.get_hostname(), "hostname", source.get_hostname())) if found else "",
        "ssh_keys": list(source.get_public_ssh_keys()) if found else [],
        "user_data": octets(source.get_userdata_raw()),
        "vendor_data": octets(source.get_vendordata_raw()),
        "sleeps": sleeps,
        "requests": requests,
    }


json.dump(crawl(*sys.argv[1:]), sys.stdout)
