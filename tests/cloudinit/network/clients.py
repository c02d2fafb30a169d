"""How cloud-init's datasources make a network configuration of the document that they fetch."""
import json

import yaml


def as_it_is(document, _macs):
    config = yaml.safe_load(document)
    return config.get("network", config)


def member(*path):
    def client(document, _macs):
        config = json.loads(document)
        for key in path:
            config = config[key]
        return config

    return client


def interfaces(document, _macs):
    from cloudinit.net import eni

    return eni.convert_eni_data(yaml.safe_load(document)["network-interfaces"])


def openstack(document, macs):
    from cloudinit.sources.helpers import openstack as helper

    return helper.convert_net_json(json.loads(document), known_macs=macs)


def vultr(document, _macs):
    from cloudinit.sources.helpers import vultr as helper

    helper.INTERFACE_NAMES = {}
    config = json.loads(document)["cloud_interfaces"]
    helper.get_interface_name = lambda mac: _macs[mac]
    helper.add_interface_names(config)
    return config


def nwcs(document, macs):
    config = json.loads(document)["network"]
    # As DataSourceNWCS.network_config does.
    for item in config["config"]:
        item["name"] = macs[item["mac_address"]]
    return config


def digitalocean(document, _macs):
    from cloudinit.sources.helpers import digitalocean as helper

    metadata = json.loads(document)
    return helper.convert_network_configuration(metadata["interfaces"], metadata["dns"]["nameservers"])


def upcloud(document, _macs):
    from cloudinit.sources.helpers import upcloud as helper

    return helper.convert_network_config(json.loads(document)["network"])


CLIENTS = {
    "as-it-is": as_it_is,
    "cloudcix": member("network"),
    "interfaces": interfaces,
    "openstack": openstack,
    "vultr": vultr,
    "nwcs": nwcs,
    "digitalocean": digitalocean,
    "upcloud": upcloud,
}
