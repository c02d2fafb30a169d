#!/usr/bin/python3
"""Writes what cloud-init made of this boot to the second serial port, as one JSON document, and ends the boot.

Baked into the image of `cargo xtask guest`; the verb reads the other end of the port.
"""
import glob
import json
import os
import subprocess
import time

PORT = "/dev/ttyS1"
# Where the firmware's tables show, and which of their values detection looks at.
FIRMWARE = "/sys/class/dmi/id/"
IDENTITY = ("bios_vendor", "product_name", "product_serial", "product_uuid")
# Lines of cloud-init's log that tell of metadata and the network, or of trouble.
TELLING = ("url_helper.py", "dhcp.py", "Applying network configuration", "WARN", "ERROR", "CRITICAL")
# A crawl logs a few hundred lines, each with all its headers: their beginnings say enough.
LINE_CHARS = 240


def said(*words):
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
        "package": said("dpkg-query", "--show", "cloud-init"),
        "firmware": {name: (content(FIRMWARE + name) or "").strip() for name in IDENTITY},
        "result": json.loads(content("/run/cloud-init/result.json") or "null"),
        "status": json.loads(content("/run/cloud-init/status.json") or "null"),
        "cloud_id": (content("/run/cloud-init/cloud-id") or "").strip(),
        "instance_id": (content("/run/cloud-init/.instance-id") or "").strip(),
        "hostname": said("hostname"),
        "authorized_keys": {path: content(path) for path in keys if content(path)},
        "marker": content("/run/xdp-imds-user-data"),
        "addresses": said("ip", "-brief", "-4", "address"),
        "interfaces": content("/etc/network/interfaces.d/50-cloud-init") or "",
        "log": [line[:LINE_CHARS] for line in log.splitlines() if any(word in line for word in TELLING)],
    }
    with open(PORT, "w", encoding="ascii") as port:
        json.dump(report, port)
        port.write("\n")


try:
    main()
finally:
    # The disk is thrown away with the machine: nothing is lost by not shutting down step by step.
    subprocess.run(["systemctl", "poweroff", "--force"], check=False)
