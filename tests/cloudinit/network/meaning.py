"""Reads the files of each renderer of cloud-init, as the program that applies them does."""
import configparser
import ipaddress
import re
import shlex

import yaml

BOND_OPTIONS = {"mode", "miimon", "xmit_hash_policy", "lacp_rate"}


class Unread(Exception):
    """A line that the program which applies the file would not understand, or this reader does not."""


def empty_device():
    return {
        "mac": None, "mtu": None, "dhcp4": False, "dhcp6": False, "slaac": None,
        "addresses": [], "routes": [], "vlan": None, "bond": None,
    }


class Meaning:
    def __init__(self):
        self.devices, self.dns, self.search = {}, set(), set()

    def device(self, name):
        return self.devices.setdefault(name, empty_device())

    def resolve(self, servers, domains=()):
        self.dns.update(str(ipaddress.ip_address(server)) for server in servers)
        self.search.update(domains)

    def json(self):
        for device in self.devices.values():
            device["addresses"] = sorted(set(device["addresses"]))
            unique = {tuple(route.items()) for route in device["routes"]}
            device["routes"] = [dict(route) for route in sorted(unique, key=str)]
        return {"devices": self.devices, "dns": sorted(self.dns), "search": sorted(self.search)}


def cidr(address, prefix=None):
    text = str(address) if prefix is None else f"{address}/{prefix}"
    if "/" not in text:
        raise Unread(f"{text} has no prefix length")
    return str(ipaddress.ip_interface(text))


def network(text, prefix=None):
    text = str(text) if prefix is None else f"{text}/{prefix}"
    return str(ipaddress.ip_network(text, strict=False))


def everything(via):
    return "::/0" if ":" in str(via) else "0.0.0.0/0"


def route(to, via, metric=None, on_link=False):
    to, via = network(to), str(ipaddress.ip_address(via))
    if (":" in to) != (":" in via):
        raise Unread(f"route to {to} via {via}")
    return {"to": to, "via": via, "metric": None if metric is None else int(metric), "on_link": bool(on_link)}


def bond_options(device, options):
    bond = device["bond"] = device["bond"] or {"links": []}
    for key, value in options.items():
        if key in BOND_OPTIONS:
            bond[key] = str(value)
        elif (key, str(value)) not in {("fail_over_mac", "none"), ("primary", "none")}:
            raise Unread(f"bond option {key}={value}")


# ifupdown: interfaces(5)


def eni(files):
    meaning = Meaning()
    [text] = [text for path, text in files.items() if "interfaces" in path]
    device, family, method, own = None, None, None, {}
    pending = []

    def close():
        if device is not None:
            eni_stanza(meaning, device, family, method, own)

    for line in text.splitlines():
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if words[0] in ("auto", "allow-hotplug"):
            close()
            device = None
        elif words[0] == "iface":
            close()
            # `eth0:1` is an alias: one more address of the same device.
            [_, name, family, method] = words
            device, own = name.split(":")[0], {"more": ":" in name}
        elif words[:3] == ["post-up", "route", "add"]:
            pending.append((device, shlex.split(line)[3:]))
        elif words[:2] == ["post-up", "ip"]:
            pending.append((device, shlex.split(line)[1:]))
        elif words[:3] == ["pre-down", "route", "del"] or words[:2] == ["pre-down", "ip"]:
            pass
        elif device is None:
            raise Unread(line)
        else:
            own.setdefault(words[0], []).append(" ".join(words[1:]))
    close()
    for device, words in pending:
        eni_route(meaning, device, words)
    meaning.devices.pop("lo", None)
    return meaning.json()


def eni_stanza(meaning, name, family, method, own):
    device = meaning.device(name)
    own = {key: value for key, value in own.items() if key != "more"}

    def take(key):
        values = own.pop(key, [])
        return values[-1] if values else None

    if method == "loopback":
        meaning.resolve(words_of(own.pop("dns-nameservers", [])), words_of(own.pop("dns-search", [])))
        return
    if method == "dhcp":
        device["dhcp4" if family == "inet" else "dhcp6"] = True
        # What DHCP gives has other metrics on each NIC.
        take("metric")
    elif (family, method) == ("inet6", "auto"):
        device["slaac"] = True
        take("dhcp")
    elif method == "static":
        address, netmask = take("address"), take("netmask")
        address = cidr(address, netmask) if netmask else cidr(address)
        device["addresses"].append(address)
        gateway = take("gateway")
        if gateway:
            # ifupdown adds `onlink` to every gateway (its inet.defn and inet6.defn).
            device["routes"].append(route(everything(gateway), gateway, take("metric"), on_link=True))
    elif method != "manual":
        raise Unread(f"iface {name} {family} {method}")
    take("accept_ra")
    # Releases since 25.2 write this too, which ifupdown does not know and ignores.
    take("accept-ra")
    # Releases from 21.4 to 25.1 write a Python mapping here instead of resolvers; ifupdown ignores it.
    take("dns")
    hwaddress = take("hwaddress")
    device["mac"] = hwaddress.removeprefix("ether ") if hwaddress else device["mac"]
    mtu = take("mtu")
    device["mtu"] = int(mtu) if mtu else device["mtu"]
    meaning.resolve(words_of(own.pop("dns-nameservers", [])), words_of(own.pop("dns-search", [])))
    vlan_id, link = take("vlan_id") or take("vlan-id"), take("vlan-raw-device")
    if link:
        number = vlan_id or re.search(r"(\d+)$", name).group(1)
        device["vlan"] = {"link": link, "id": int(number)}
    master = take("bond-master")
    if master:
        bond = meaning.device(master)
        bond["bond"] = bond["bond"] or {"links": []}
        bond["bond"]["links"] = sorted({*bond["bond"]["links"], name})
    # ifenslave takes hyphens and underscores for the same.
    bond = {key.replace("_", "-"): own.pop(key)[-1] for key in list(own) if key.startswith(("bond-", "bond_"))}
    for key, value in bond.items():
        if key == "bond-slaves":
            # `none`: each NIC names its master.
            named = [] if value == "none" else value.split()
            entry = device["bond"] = device["bond"] or {"links": []}
            entry["links"] = sorted({*entry["links"], *named})
        elif not master:
            bond_options(device, {key.removeprefix("bond-").replace("-", "_"): value})
    if own:
        raise Unread(f"iface {name}: {own}")


def words_of(values):
    return [word for value in values for word in value.split()]


def eni_route(meaning, name, words):
    """`route` of net-tools or, since 25.3, `ip route`; both look the device up by the gateway."""
    words = [word for word in words if word not in ("||", "true")]
    if words[0] == "ip":
        return ip_route(meaning, name, words[1:])
    is_v6 = words[:2] == ["-A", "inet6"]
    words = words[2:] if is_v6 else words
    to = words.pop(0)
    if to in ("-net", "-host"):
        if is_v6:
            raise Unread(f"route {to} {words}")
        to = words.pop(0)
    elif to == "default":
        to = "::/0" if is_v6 else "0.0.0.0/0"
    elif not is_v6:
        raise Unread(f"route {to}")
    options = dict(zip(words[::2], words[1::2]))
    netmask, via, metric = (options.pop(key, None) for key in ("netmask", "gw", "metric"))
    if options or len(words) % 2:
        raise Unread(f"route {words}")
    if (":" in to) != is_v6:
        raise Unread(f"route to {to} without -A inet6")
    to = network(to, netmask) if netmask else to
    add_route(meaning, name, route(to, via, metric))


def ip_route(meaning, name, words):
    words = words[2:] if words[0] == "-family" else words
    if words[:2] != ["route", "add"]:
        raise Unread(f"ip {words}")
    options = dict(zip(words[3::2], words[4::2]))
    via, metric = options.pop("via"), options.pop("metric", None)
    if options:
        raise Unread(f"ip {words}")
    to = everything(via) if words[2] == "default" else words[2]
    add_route(meaning, name, route(to, via, metric))


def add_route(meaning, name, found):
    to, via = found["to"], found["via"]
    if ipaddress.ip_address(via).is_link_local:
        # Without a device the command fails, and ` || true` hides it.
        return
    if name is None:
        [name] = [name for name, device in meaning.devices.items() if reaches(device, via)][:1] or [None]
        if name is None:
            raise Unread(f"route to {to} via {via} of no device")
    meaning.device(name)["routes"].append(found)


def reaches(device, via):
    via = ipaddress.ip_address(via)
    return any(via in ipaddress.ip_interface(address).network for address in device["addresses"])


# initscripts, and NetworkManager's plugin ifcfg-rh


def sysconfig(files):
    meaning = Meaning()
    for path, text in files.items():
        name = path.rsplit("/", 1)[-1]
        if name.startswith("ifcfg-"):
            sysconfig_device(meaning, name.removeprefix("ifcfg-"), shell(text))
        elif name == "resolv.conf":
            for line in text.splitlines():
                words = line.split()
                if line.startswith(("nameserver", "search")):
                    meaning.resolve(words[1:], ()) if words[0] == "nameserver" else meaning.resolve((), words[1:])
    for path, text in files.items():
        name = path.rsplit("/", 1)[-1]
        if name.startswith("route-"):
            own = shell(text)
            numbers = sorted({int(re.search(r"\d+$", key).group()) for key in own})
            for number in numbers:
                to = network(own[f"ADDRESS{number}"], own[f"NETMASK{number}"])
                found = route(to, own[f"GATEWAY{number}"], own.get(f"METRIC{number}"), AUTOMATIC)
                meaning.device(name.removeprefix("route-"))["routes"].append(found)
        elif name.startswith("route6-"):
            for line in text.splitlines():
                words = line.split()
                if not words or line.startswith("#"):
                    continue
                options = dict(zip(words[1::2], words[2::2]))
                found = route(words[0], options["via"], options.get("metric"), AUTOMATIC)
                meaning.device(name.removeprefix("route6-"))["routes"].append(found)
    return meaning.json()


# NetworkManager adds a route to a gateway that no prefix holds (nm_l3_config_data_add_dependent_onlink_routes).
AUTOMATIC = True


def shell(text):
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found[key] = " ".join(shlex.split(value))
    return found


def sysconfig_device(meaning, name, own):
    device = meaning.device(own.pop("DEVICE", name))
    known = {"BOOTPROTO": "none", "ONBOOT": "yes", "STARTMODE": "auto", "USERCTL": "no", "NM_CONTROLLED": "no"}
    boot = own.pop("BOOTPROTO", "none")
    if boot not in ("none", "dhcp"):
        raise Unread(f"BOOTPROTO={boot}")
    device["dhcp4"] = boot == "dhcp"
    device["dhcp6"] = own.pop("DHCPV6C", "no") == "yes" and own.pop("DHCPV6C_OPTIONS", "") != "-S"
    if "IPV6_AUTOCONF" in own:
        device["slaac"] = own["IPV6_AUTOCONF"] == "yes"
    is_up = own.pop("ONBOOT", "yes") == "yes"
    for key in ("STARTMODE", "USERCTL", "NM_CONTROLLED", "TYPE", "IPV6INIT", "IPV6_AUTOCONF", "IPV6_FORCE_ACCEPT_RA",
                "DHCLIENT_SET_DEFAULT_ROUTE", "AUTOCONNECT_PRIORITY", "IPV6_FAILURE_FATAL"):
        own.pop(key, None)
    device["mac"] = (own.pop("HWADDR", None) or own.pop("MACADDR", None) or "").lower() or device["mac"]
    mtu, mtu6 = own.pop("MTU", None), own.pop("IPV6_MTU", None)
    device["mtu"] = int(mtu or mtu6) if mtu or mtu6 else None
    for number in ["", *map(str, range(16))]:
        address = own.pop(f"IPADDR{number}", None)
        if address:
            mask = own.pop(f"NETMASK{number}", None) or own.pop(f"PREFIX{number}")
            device["addresses"].append(cidr(address, mask))
    v6 = [own.pop("IPV6ADDR", None), *(own.pop("IPV6ADDR_SECONDARIES", "").split())]
    device["addresses"] += [cidr(address) for address in v6 if address]
    if not is_up and (device["addresses"] or device["dhcp4"] or device["dhcp6"]):
        raise Unread(f"{name} is not brought up")
    defroute = own.pop("DEFROUTE", "no")
    metrics = own.pop("METRIC", None) or own.pop("IPV4_ROUTE_METRIC", None), own.pop("IPV6_ROUTE_METRIC", None)
    for key, metric in zip(("GATEWAY", "IPV6_DEFAULTGW"), metrics):
        gateway = own.pop(key, None)
        if gateway:
            if defroute != "yes":
                raise Unread(f"{key} without DEFROUTE")
            if (key == "GATEWAY") == (":" in gateway):
                raise Unread(f"{key}={gateway}")
            device["routes"].append(route(everything(gateway), gateway, metric, AUTOMATIC))
    dns = [own.pop(f"DNS{number}") for number in range(1, 10) if f"DNS{number}" in own]
    meaning.resolve(dns, own.pop("DOMAIN", "").split())
    if own.pop("VLAN", "no") == "yes":
        # initscripts know these two forms of names.
        number = own.pop("VLAN_ID", None) or re.search(r"(?:\.|^vlan)0*(\d+)$", name).group(1)
        device["vlan"] = {"link": own.pop("PHYSDEV"), "id": int(number)}
    if own.pop("BONDING_MASTER", "no") == "yes":
        device["bond"] = device["bond"] or {"links": []}
    options = own.pop("BONDING_OPTS", None)
    if options:
        bond_options(device, dict(option.split("=") for option in options.split()))
    for key in [key for key in own if key.startswith("BONDING_SLAVE")]:
        device["bond"]["links"] = sorted({*device["bond"]["links"], own.pop(key)})
    if own.pop("SLAVE", "no") == "yes":
        bond = meaning.device(own.pop("MASTER"))
        bond["bond"] = bond["bond"] or {"links": []}
        bond["bond"]["links"] = sorted({*bond["bond"]["links"], name})
    if own:
        raise Unread(f"{name}: {own}")


# systemd-networkd: systemd.network(5)


def sections(text):
    """systemd and NetworkManager repeat section and key names, so configparser does not do."""
    found = []
    for line in text.splitlines():
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        if line.startswith("["):
            found.append((line[1:-1], []))
        else:
            key, value = line.split("=", 1)
            found[-1][1].append((key.strip(), value.strip()))
    return found


def networkd(files):
    meaning = Meaning()
    for path, text in files.items():
        if path.endswith(".network"):
            networkd_file(meaning, text)
        elif path.endswith(".netdev"):
            networkd_netdev(meaning, text)
        elif not path.endswith(".link"):
            raise Unread(path)
    meaning.devices.pop("lo", None)
    return meaning.json()


NETWORKD_BOND = {
    "Mode": "mode", "MIIMonitorSec": "miimon", "TransmitHashPolicy": "xmit_hash_policy",
    "LACPTransmitRate": "lacp_rate",
}


def networkd_netdev(meaning, text):
    """Releases since 25.3 write a file for each VLAN and bond."""
    found = {name: dict(own) for name, own in sections(text)}
    device = meaning.device(found["NetDev"]["Name"])
    if found["NetDev"]["Kind"] == "vlan":
        device["vlan"] = (device["vlan"] or {"link": None}) | {"id": int(found["VLAN"]["Id"])}
    else:
        options = {NETWORKD_BOND[key]: value for key, value in found.get("Bond", {}).items()}
        if "miimon" in options:
            options["miimon"] = options["miimon"].removesuffix("ms")
        bond_options(device, options)


def networkd_file(meaning, text):
    found = sections(text)
    [match] = [dict(own) for name, own in found if name == "Match"]
    device = meaning.device(match["Name"])
    device["mac"] = match.get("MACAddress")
    for section, own in found:
        values = dict(own)
        if section == "Link":
            device["mtu"] = int(values.pop("MTUBytes")) if "MTUBytes" in values else device["mtu"]
            device["mac"] = values.pop("MACAddress", device["mac"])
        elif section == "Network":
            dhcp = values.pop("DHCP", "no")
            device["dhcp4"], device["dhcp6"] = dhcp in ("yes", "ipv4"), dhcp in ("yes", "ipv6")
            if "IPv6AcceptRA" in values:
                device["slaac"] = values.pop("IPv6AcceptRA").lower() in ("yes", "true")
            for key, value in own:
                if key == "Gateway":
                    device["routes"].append(route(everything(value), value))
                elif key == "Address":
                    device["addresses"].append(cidr(value))
                elif key == "VLAN":
                    vlan = meaning.device(value)
                    vlan["vlan"] = (vlan["vlan"] or {}) | {"link": match["Name"]}
                elif key == "Bond":
                    bond = meaning.device(value)
                    bond["bond"] = bond["bond"] or {"links": []}
                    bond["bond"]["links"] = sorted({*bond["bond"]["links"], match["Name"]})
                elif key == "DNS":
                    meaning.resolve(value.split())
                elif key == "Domains":
                    meaning.resolve((), value.split())
            for key in ("Gateway", "DNS", "Domains", "Address", "VLAN", "Bond"):
                values.pop(key, None)
        elif section == "Address":
            device["addresses"].append(cidr(values.pop("Address")))
        elif section == "Route":
            gateway = values.pop("Gateway")
            on_link = values.pop("GatewayOnLink", "no") == "yes"
            to = values.pop("Destination", everything(gateway))
            device["routes"].append(route(to, gateway, values.pop("Metric", None), on_link))
        elif section == "Match":
            values = {}
        elif section in ("DHCPv4", "DHCPv6"):
            values = {}
        if values:
            raise Unread(f"[{section}] {values}")


# NetworkManager: nm-settings-keyfile(5)


def network_manager(files):
    meaning, profiles = Meaning(), {}
    for path, text in files.items():
        if path.endswith(".nmconnection"):
            profile = {name: dict(own) for name, own in sections(text)}
            profiles[profile["connection"]["uuid"]] = profile
        elif "conf.d" not in path:
            raise Unread(path)
    names = {uuid: nm_name(profile) for uuid, profile in profiles.items()}
    for uuid, profile in profiles.items():
        nm_profile(meaning, names[uuid], profile, names)
    return meaning.json()


def nm_name(profile):
    connection = profile["connection"]
    return connection.get("interface-name") or connection["id"].removeprefix("cloud-init ")


def nm_profile(meaning, name, profile, names):
    device = meaning.device(name)
    connection = profile.pop("connection")
    wired = profile.pop("ethernet", {})
    mac = wired.pop("mac-address", None) or wired.pop("cloned-mac-address", None)
    device["mac"] = mac.lower() if mac else None
    mtu = wired.pop("mtu", None)
    device["mtu"] = int(mtu) if mtu else None
    if wired:
        raise Unread(f"[ethernet] {wired}")
    master = connection.get("master") or connection.get("controller")
    if master:
        bond = meaning.device(names.get(master, master))
        bond["bond"] = bond["bond"] or {"links": []}
        bond["bond"]["links"] = sorted({*bond["bond"]["links"], name})
    if "vlan" in profile:
        own = profile.pop("vlan")
        parent = own.pop("parent")
        device["vlan"] = {"link": names.get(parent, parent), "id": int(own.pop("id"))}
        own.pop("flags", None)
        if own:
            raise Unread(f"[vlan] {own}")
    if "bond" in profile:
        bond_options(device, profile.pop("bond"))
    elif connection["type"] == "bond":
        device["bond"] = device["bond"] or {"links": []}
    for family, everywhere in (("ipv4", "0.0.0.0/0"), ("ipv6", "::/0")):
        nm_family(meaning, device, family, everywhere, dict(profile.pop(family, NM_DEFAULT)))
    profile.pop("user", None)
    profile.pop("proxy", None)
    if profile:
        raise Unread(str(profile))


# NetworkManager gives a profile without this section the method `auto`, which waits for nobody.
NM_DEFAULT = {"method": "default"}


def nm_family(meaning, device, family, everywhere, own):
    method = own.pop("method")
    if method == "default":
        return
    own.pop("may-fail", None)
    own.pop("addr-gen-mode", None)
    if method == "auto" and family == "ipv4":
        device["dhcp4"] = True
    elif method == "auto":
        # Router advertisements say whether DHCPv6 is used too.
        device["dhcp6"] = device["slaac"] = True
    elif method == "dhcp":
        device["dhcp6"] = True
    elif method not in ("manual", "disabled", "ignore", "link-local"):
        raise Unread(f"method={method}")
    elif family == "ipv6":
        device["slaac"] = False
    gateway, metric = own.pop("gateway", None), own.pop("route-metric", None)
    for key in sorted(key for key in own if re.fullmatch(r"address\d+", key)):
        parts = own.pop(key).split(",")
        device["addresses"].append(cidr(parts[0]))
        gateway = gateway or (parts[1:] or [None])[0]
    if gateway:
        device["routes"].append(route(everywhere, gateway, metric, AUTOMATIC))
    for key in sorted(key for key in own if re.fullmatch(r"route\d+", key)):
        to, via, *more = own.pop(key).split(",")
        own.pop(f"{key}_options", None)
        found = route(to, via, more[0] if more else None, AUTOMATIC)
        if found["to"] == everywhere and not more:
            found["metric"] = None if metric is None else int(metric)
        device["routes"].append(found)
    meaning.resolve(split(own.pop("dns", "")), split(own.pop("dns-search", "")))
    if own:
        raise Unread(f"[{family}] {own}")
    if method in ("disabled", "ignore") and (gateway or device_family(device, family)):
        raise Unread(f"{family} is off but has addresses")


def device_family(device, family):
    return [address for address in device["addresses"] if (":" in address) == (family == "ipv6")]


def split(text):
    return [word for word in text.split(";") if word]


# netplan


NETPLAN_BOND = {
    "mode": "mode", "mii-monitor-interval": "miimon", "transmit-hash-policy": "xmit_hash_policy",
    "lacp-rate": "lacp_rate",
}


def netplan(files):
    meaning = Meaning()
    [text] = [text for path, text in files.items() if "netplan" in path]
    document = yaml.safe_load(text)["network"]
    if document.pop("version") != 2:
        raise Unread("netplan knows version 2 only")
    for section in ("ethernets", "bonds", "vlans"):
        for name, own in document.pop(section, {}).items():
            netplan_device(meaning, own.get("set-name", name), section, own)
    if document:
        raise Unread(str(document))
    return meaning.json()


def netplan_device(meaning, name, section, own):
    own = dict(own)
    device = meaning.device(name)
    own.pop("set-name", None)
    match = own.pop("match", {})
    device["mac"] = match.pop("macaddress", None) or own.pop("macaddress", None)
    if match:
        raise Unread(f"match {match}")
    mtu = own.pop("mtu", None)
    device["mtu"] = int(mtu) if mtu else None
    device["dhcp4"], device["dhcp6"] = bool(own.pop("dhcp4", False)), bool(own.pop("dhcp6", False))
    device["slaac"] = own.pop("accept-ra", None)
    if section == "vlans":
        device["vlan"] = {"link": own.pop("link"), "id": int(own.pop("id"))}
    if section == "bonds":
        device["bond"] = {"links": sorted(own.pop("interfaces"))}
        options = own.pop("parameters", {})
        bond_options(device, {NETPLAN_BOND.get(key, key): value for key, value in options.items()})
    device["addresses"] = [cidr(address) for address in own.pop("addresses", [])]
    for key in ("gateway4", "gateway6"):
        gateway = own.pop(key, None)
        if gateway:
            if (key == "gateway6") != (":" in gateway):
                raise Unread(f"{key}: {gateway}")
            device["routes"].append(route(everything(gateway), gateway))
    for entry in own.pop("routes", []):
        entry = dict(entry)
        to, via = entry.pop("to"), entry.pop("via")
        to = everything(via) if to in ("default", "0.0.0.0/0", "::/0") else to
        device["routes"].append(route(to, via, entry.pop("metric", None), entry.pop("on-link", False)))
        if entry:
            raise Unread(f"route {entry}")
    servers = own.pop("nameservers", {})
    meaning.resolve(servers.pop("addresses", []), servers.pop("search", []))
    own.pop("critical", None)
    # What DHCP gives has other metrics on each NIC.
    for key in ("dhcp4-overrides", "dhcp6-overrides"):
        if set(own.pop(key, {})) - {"route-metric", "use-dns", "use-routes"}:
            raise Unread(key)
    if own or servers:
        raise Unread(f"{name}: {own} {servers}")


READERS = {
    "eni": eni,
    "sysconfig": sysconfig,
    "networkd": networkd,
    "network-manager": network_manager,
    "netplan": netplan,
}
