#!/usr/bin/python3
"""Writes the results of cloud-init to the second serial port, as one JSON document.

The image of `cargo xtask guest` has this script; the verb reads the other end of the port, and ends the machine.
"""
import glob
import json
import os
import subprocess
import time

PORT = "/dev/ttyS1"
# The directory of the firmware's tables, and the values by which cloud-init detects a datasource.
FIRMWARE = "/sys/class/dmi/id/"
IDENTITY = ("bios_vendor", "product_name", "product_serial", "product_uuid")
# The report includes lines of cloud-init's log with one of these words: requests, DHCP, network and problems.
REPORTED = ("url_helper.py", "dhcp.py", "Applying network configuration", "WARN", "ERROR", "CRITICAL")
# A crawl logs a few hundred lines, each with all its headers. The report has only their beginnings.
LINE_CHARS = 240


def output_of(*words):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.stdout.decode(errors="replace").strip()


def content(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def main():
    log = content("/var/log/cloud-init.log") or ""
    keys = glob.glob("/home/*/.ssh/authorized_keys") + [os.path.expanduser("~root/.ssh/authorized_keys")]
    report = {
        "uptime_seconds": time.clock_gettime(time.CLOCK_BOOTTIME),
        "package": output_of("dpkg-query", "--show", "cloud-init"),
        "firmware": {name: (content(FIRMWARE + name) or "").strip() for name in IDENTITY},
        "result": json.loads(content("/run/cloud-init/result.json") or "null"),
        "status": json.loads(content("/run/cloud-init/status.json") or "null"),
        "cloud_id": (content("/run/cloud-init/cloud-id") or "").strip(),
        "instance_id": (content("/run/cloud-init/.instance-id") or "").strip(),
        "hostname": output_of("hostname"),
        "authorized_keys": {path: content(path) for path in keys if content(path)},
        "marker": content("/run/xdp-imds-user-data"),
        "addresses": output_of("ip", "-brief", "-4", "address"),
        "interfaces": content("/etc/network/interfaces.d/50-cloud-init") or "",
        "log": [line[:LINE_CHARS] for line in log.splitlines() if any(word in line for word in REPORTED)],
    }
    with open(PORT, "w", encoding="ascii") as port:
        json.dump(report, port)
        port.write("\n")


try:
    main()
except BaseException:
    # The verb need not wait for a report that does not come. The disk is discarded with the machine, so an orderly
    # shutdown would save nothing.
    subprocess.run(["systemctl", "poweroff", "--force"], check=False)
    raise
