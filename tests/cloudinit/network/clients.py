"""How cloud-init's datasources make a network configuration of the document that they fetch."""
import inspect
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


class Distribution:
    """What datasources ask of the distribution. No renderer of theirs is netplan's, so EC2's makes no policy routes."""

    fallback_interface = "eth0"
    network_renderer = None
    network_activator = None

    @staticmethod
    def generate_fallback_config():
        mac = next(iter(NICS))
        ethernet = {"dhcp4": True, "set-name": NICS[mac], "match": {"macaddress": mac}}
        return {"version": 2, "ethernets": {NICS[mac]: ethernet}}


NICS = {}


def source(module, macs, **members):
    """A datasource that has fetched its documents. Its constructor would look at this machine."""
    NICS.clear()
    NICS.update(macs)
    module.get_interfaces_by_mac = lambda *_args, **_kwargs: dict(macs)
    made = object.__new__(getattr(module, module.__name__.rsplit(".", 1)[-1]))
    made.distro, made.ds_cfg = Distribution(), {"configure_secondary_nics": True}
    for name, value in members.items():
        setattr(made, name, value)
    return made


def ec2(document, macs):
    from cloudinit.sources import DataSourceEc2 as module

    try:
        from cloudinit.sources.helpers import ec2 as helper
    except ImportError:
        from cloudinit import ec2_utils as helper
    files = json.loads(document)

    def fetch(url):
        return files[url].encode()

    metadata = helper.MetadataMaterializer(files[""].encode(), "", fetch).materialize()
    try:
        return module.convert_ec2_metadata_network_config(metadata, Distribution(), macs_to_nics=dict(macs))
    except TypeError:
        # Releases before 24.1 take no distribution.
        return module.convert_ec2_metadata_network_config(metadata, macs_to_nics=dict(macs))


def aliyun(document, macs):
    from cloudinit.sources.helpers import aliyun as helper

    helper.url_helper.read_file_or_url = lambda *_args, **_kwargs: Answer(document)
    metadata = helper.get_instance_meta_data()
    return helper.convert_ecs_metadata_network_config(metadata["network"], macs_to_nics=dict(macs))


class Answer:
    def __init__(self, text):
        self.contents = text.encode()


def azure(document, _macs):
    from cloudinit.sources import DataSourceAzure as module

    metadata = json.loads(document)
    module.determine_device_driver_for_mac = lambda _mac: None
    module.device_driver = lambda _name: None
    convert = getattr(module, "generate_network_config_from_instance_network_metadata", None)
    if convert is None:
        return module._generate_network_config_from_imds_metadata(metadata)
    # 23.1 adds the first option, 26.1 the second one. A decorator hides the signature.
    options = {"apply_network_config_for_secondary_ips": True, "apply_network_config_set_name": True}
    while True:
        try:
            return convert(metadata["network"], **options)
        except TypeError as error:
            if "unexpected keyword" not in str(error) or not options:
                raise
            options.popitem()


def oracle(document, macs):
    from cloudinit.sources import DataSourceOracle as module

    made = source(module, macs, _vnics_data=json.loads(document), _network_config={"config": [], "version": 1})
    if inspect.signature(made._add_network_config_from_opc_imds).parameters:
        made._add_network_config_from_opc_imds(True)
    else:
        # Before 22.1 the first NIC is not in question.
        made._network_config = made.distro.generate_fallback_config()
        made._add_network_config_from_opc_imds()
    return made._network_config


def scaleway(document, macs):
    from cloudinit import sources
    from cloudinit.sources import DataSourceScaleway as module

    metadata = json.loads(document)
    leased = [entry["address"] for entry in metadata["public_ips"] if entry["family"] == "inet"]
    made = source(
        module, macs, metadata=metadata, _network_config=sources.UNSET, _fallback_interface="eth0",
        ephemeral_fixed_address=next(iter(leased), None),
    )
    return made.network_config


CLIENTS = {
    "as-it-is": as_it_is,
    "cloudcix": member("network"),
    "interfaces": interfaces,
    "openstack": openstack,
    "vultr": vultr,
    "nwcs": nwcs,
    "digitalocean": digitalocean,
    "upcloud": upcloud,
    "ec2": ec2,
    "aliyun": aliyun,
    "azure": azure,
    "oracle": oracle,
    "scaleway": scaleway,
}
