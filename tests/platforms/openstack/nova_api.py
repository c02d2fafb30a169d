"""Serves Nova's metadata API, unmodified, at port 8775 of this namespace: `python3 nova_api.py DIRECTORY`.

DIRECTORY gets the configuration and the databases, which Nova's own migrations make. Each line of standard input is an
instance in JSON, which `nova.objects` store, and each is answered by a line. Each request to Nova becomes a line of
DIRECTORY/requests.

Nova takes an instance's networks from its own cache of them, and asks no other service but Neutron, and Neutron only
for security groups: `neutron` stands in for that. `auth_type = none` does without Keystone.
"""

import base64
import json
import os
import sys
import threading
import urllib.parse
import wsgiref.simple_server

ROOM = sys.argv[1]
FILES = {
    "nova.conf": f"""
[DEFAULT]
host = node-1
state_path = {ROOM}
transport_url = fake:/
[database]
connection = sqlite:///{ROOM}/cell.db
[api_database]
connection = sqlite:///{ROOM}/api.db
[api]
dhcp_domain = lab.internal
vendordata_jsonfile_path = {ROOM}/vendor_data.json
[neutron]
service_metadata_proxy = true
metadata_proxy_shared_secret = s3cr3t
auth_type = none
endpoint_override = http://127.0.0.1:9696/
""",
    # Nova's own has filters for browsers and proxies in front of it.
    "api-paste.ini": """
[app:metadata]
paste.app_factory = nova.api.metadata.handler:MetadataRequestHandler.factory
""",
    "vendor_data.json": json.dumps({"cloud-init": "#cloud-config\n{}\n"}),
}
CELL = "ce110000-0000-4000-8000-000000000001"
GROUP = "5ec00000-0000-4000-8000-000000000001"
IMAGE = "1a9e0000-0000-4000-8000-000000000001"
NETWORK = "4e700000-0000-4000-8000-000000000001"
USER = "0" * 32

is_new = not os.path.exists(f"{ROOM}/nova.conf")
for name, text in FILES.items():
    with open(f"{ROOM}/{name}", "w") as file:
        file.write(text)
os.environ["OS_NOVA_CONFIG_DIR"] = ROOM
sys.argv = ["nova-api-metadata"]
# Nova logs to standard output.
answers, sys.stdout = sys.stdout, sys.stderr

# As `nova.wsgi.metadata` does, before anything else of Nova.
from nova import monkey_patch

monkey_patch.patch(backend="threading")

import nova.conf
import waitress
from nova import context, objects
from nova.api.openstack import wsgi_app
from nova.db import migration
from nova.network import model

wsgi_app.init_global_data([f"{ROOM}/nova.conf"], "metadata", sys.argv[0])
admin = context.get_admin_context()
if is_new:
    migration.db_sync(database="api")
    migration.db_sync(database="main")
    for uuid, name, transport in (objects.CellMapping.CELL0_UUID, "cell0", "none:/"), (CELL, "cell1", "fake:/"):
        cell = objects.CellMapping(admin, uuid=uuid, name=name, transport_url=transport)
        cell.database_connection = nova.conf.CONF.database.connection
        cell.create()

from nova.wsgi.metadata import application


def network_info(port):
    """What Nova keeps of a port, as `nova.network.neutron` builds it."""
    subnet = model.Subnet(
        cidr="10.0.0.0/16",
        dns=[model.IP("10.0.0.3", "dns")],
        gateway=model.IP("10.0.2.2", "gateway"),
        ips=[model.FixedIP(address=port["address"])],
        routes=[],
        dhcp_server="10.0.0.4",
        version=4,
    )
    network = model.Network(NETWORK, bridge="br-int", label="net", subnets=[subnet], mtu=1442)
    tap = "tap" + port["id"][:11]
    return model.NetworkInfo([model.VIF(port["id"], port["mac"], network, "ovs", devname=tap, active=True)])


def store(of):
    """Stores an instance as nova-api and nova-conductor do."""
    owner = {"project_id": of["project"], "user_id": USER}
    cell = objects.CellMapping.get_by_uuid(admin, CELL)
    objects.InstanceMapping(admin, instance_uuid=of["uuid"], cell_mapping=cell, **owner).create()
    key = objects.KeyPair(name="key", type="ssh", public_key=of["ssh_key"], fingerprint="", user_id=USER)
    bus = objects.PCIDeviceBus(address="0000:00:03.0")
    nic = {"mac": of["port"]["mac"], "bus": bus, "tags": ["front"], "vlan": 7, "vf_trusted": False}
    sizes = {"memory_mb": 512, "vcpus": 1, "root_gb": 1, "ephemeral_gb": 0, "swap": 0, "rxtx_factor": 1.0}
    with context.target_cell(admin, cell) as in_cell:
        instance = objects.Instance(
            in_cell,
            uuid=of["uuid"],
            hostname=of["hostname"],
            display_name=of["hostname"],
            launch_index=0,
            reservation_id="r-0000000a",
            availability_zone="nova",
            host="node-1",
            image_ref=IMAGE,
            vm_state="active",
            key_name=key.name,
            key_data=key.public_key,
            keypairs=objects.KeyPairList(objects=[key]),
            metadata={"role": "web", "town": "Zürich"},
            system_metadata={},
            user_data=base64.b64encode(of["user_data"].encode()).decode(),
            flavor=objects.Flavor(id=1, flavorid="1", name="m1.small", extra_specs={}, **sizes),
            old_flavor=None,
            new_flavor=None,
            device_metadata=objects.InstanceDeviceMetadata(devices=[objects.NetworkInterfaceMetadata(**nic)]),
            **owner,
        )
        instance.create()
        cache = objects.InstanceInfoCache.get_by_instance_uuid(in_cell, of["uuid"])
        cache.network_info = network_info(of["port"])
        cache.save()
        disk = {"source_type": "image", "destination_type": "local", "device_type": "disk", "boot_index": 0}
        objects.BlockDeviceMapping(
            in_cell, instance_uuid=of["uuid"], device_name="/dev/vda", image_id=IMAGE, **disk
        ).create()


def neutron(environ, start_response):
    """Says which security groups the ports of devices have, and what these are called."""
    devices = urllib.parse.parse_qs(environ["QUERY_STRING"]).get("device_id", [])
    answers = {
        "/v2.0/ports": {"ports": [{"device_id": device, "security_groups": [GROUP]} for device in devices]},
        "/v2.0/security-groups": {"security_groups": [{"id": GROUP, "name": "default"}]},
    }
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(answers[environ["PATH_INFO"]]).encode()]


def noted(environ, start_response):
    """Writes a request down and has Nova answer it."""
    fields = {name[5:]: value for name, value in environ.items() if name.startswith("HTTP_")}
    request = {"method": environ["REQUEST_METHOD"], "path": environ["PATH_INFO"], "fields": fields}
    with open(f"{ROOM}/requests", "a") as file:
        file.write(json.dumps(request) + "\n")
    return application(environ, start_response)


# waitress would leave `X-Forwarded-For` out.
server = waitress.create_server(noted, listen="127.0.0.1:8775", clear_untrusted_proxy_headers=False)
others = wsgiref.simple_server.make_server("127.0.0.1", 9696, neutron)
for run in server.run, others.serve_forever:
    threading.Thread(target=run, daemon=True).start()
print("serving", file=answers, flush=True)
for line in sys.stdin:
    store(json.loads(line))
    print("stored", file=answers, flush=True)
