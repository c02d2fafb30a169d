//! Renders a record's instance document.

use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::dialect::json::json;
use crate::record::Record;
use crate::record::network::{Address, Method, Mode, Nic};
use crate::record::values::{Cidr, Line};
use crate::record::vm::{Image, Payload, SshKey};

pub(super) fn whole(record: &Record) -> Value {
    let mut document = json!({
        "compute": compute(record),
        "extended": { "compute": { "hasCustomData": false, "ppsType": "None" } },
    });
    // cloud-init configures no NIC from an empty list, and falls back to DHCP without the list.
    let nics: Vec<Value> = record.network.nics.iter().filter_map(interface).collect();
    if record.network.mode != Mode::None && !nics.is_empty() {
        document["network"] = json!({ "interface": nics });
    }
    document
}

fn compute(record: &Record) -> Value {
    let user = admin(record);
    let octets = record.user_data.as_ref().and_then(Payload::bytes);
    let domain = record.placement.fault_domain.as_ref().unwrap_or(&record.placement.zone);
    let tags: Vec<String> = record.metadata.0.iter().map(|(name, value)| format!("{name}:{value}")).collect();
    let tag = |(name, value): (&String, &String)| json!({ "name": name.as_str(), "value": value.as_str() });
    // Azure serves empty strings for a customer's own image.
    let image = |of: fn(&Image) -> &Option<Line>| {
        record.image.as_ref().and_then(|image| of(image).as_ref()).map_or("", Line::as_str)
    };
    let mut document = json!({
        "azEnvironment": "AzurePublicCloud",
        "location": record.placement.region.as_str(),
        "name": record.vm.name.as_str(),
        "offer": image(|image| &image.offer),
        "osProfile": {
            "adminUsername": user,
            "computerName": record.hostname.short.as_str(),
            "disablePasswordAuthentication": "true",
        },
        "osType": "Linux",
        "physicalZone": record.placement.zone.as_str(),
        "platformFaultDomain": domain.as_str(),
        "platformUpdateDomain": "0",
        "provider": "Microsoft.Compute",
        "publicKeys": record.ssh_keys.iter().map(|key| public_key(key, user)).collect::<Vec<_>>(),
        "publisher": image(|image| &image.publisher),
        "resourceGroupName": record.vm.project.id.as_str(),
        "resourceId": resource_id(record),
        "sku": image(|image| &image.sku),
        "storageProfile": storage(&image),
        "subscriptionId": super::subscription(record),
        "tags": tags.join(";"),
        "tagsList": record.metadata.0.iter().map(tag).collect::<Vec<_>>(),
        "userData": octets.map_or_else(String::new, |octets| STANDARD.encode(octets)),
        "version": image(|image| &image.version),
        "vmId": record.vm.uuid.as_str(),
        "vmSize": record.instance_type(),
        "zone": "",
    });
    add_inapplicable(&mut document);
    document
}

/// Adds the members that records have nothing for. Azure includes them always, as empty strings.
fn add_inapplicable(compute: &mut Value) {
    for name in [
        "customData",
        "evictionPolicy",
        "isHostCompatibilityLayerVm",
        "licenseType",
        "placementGroupId",
        "platformSubFaultDomain",
        "priority",
        "vmScaleSetName",
    ] {
        compute[name] = "".into();
    }
    for (name, members) in [
        ("additionalCapabilities", &["hibernationEnabled"][..]),
        ("extendedLocation", &["name", "type"]),
        ("host", &["id"]),
        ("hostGroup", &["id"]),
        ("plan", &["name", "product", "publisher"]),
        ("securityProfile", &["encryptionAtHost", "secureBootEnabled", "securityType", "virtualTpmEnabled"]),
        ("virtualMachineScaleSet", &["id"]),
    ] {
        compute[name] = members.iter().map(|member| ((*member).to_owned(), Value::from(""))).collect();
    }
}

/// Returns the VM's id in Azure's form, from which Talos and Kubernetes make that of a node.
fn resource_id(record: &Record) -> String {
    format!(
        "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.Compute/virtualMachines/{}",
        super::subscription(record),
        record.vm.project.id,
        record.vm.name
    )
}

/// Returns the storage profile. Of the disks the service knows nothing.
fn storage<'a>(image: &impl Fn(fn(&Image) -> &Option<Line>) -> &'a str) -> Value {
    let (nothing, no_uri) = ("", || json!({ "uri": "" }));
    json!({
        "dataDisks": [],
        "imageReference": {
            "communityGalleryImageId": nothing,
            "exactVersion": nothing,
            "id": nothing,
            "offer": image(|image| &image.offer),
            "publisher": image(|image| &image.publisher),
            "sharedGalleryImageId": nothing,
            "sku": image(|image| &image.sku),
            "version": image(|image| &image.version),
        },
        "osDisk": {
            "caching": nothing,
            "createOption": nothing,
            "diffDiskSettings": { "option": nothing },
            "diskSizeGB": nothing,
            "image": no_uri(),
            "managedDisk": { "id": nothing, "storageAccountType": nothing },
            "name": nothing,
            "osType": "Linux",
            "vhd": no_uri(),
            "writeAcceleratorEnabled": nothing,
        },
        "resourceDisk": { "size": "0" },
    })
}

fn admin(record: &Record) -> &str {
    let user = record.admin.as_ref().and_then(|admin| admin.user.as_ref());
    user.map_or("", |user| user.as_str())
}

/// Returns a key and its file: that of the key's account, else of the administrator, else of root.
fn public_key(key: &SshKey, admin: &str) -> Value {
    let home = match key.user.as_ref().map_or(admin, |user| user.as_str()) {
        "" | "root" => "/root".to_owned(),
        user => format!("/home/{user}"),
    };
    json!({ "keyData": key.key.as_str(), "path": format!("{home}/.ssh/authorized_keys") })
}

/// Returns a NIC. Azure's clients do not support VLANs and bonds.
fn interface(nic: &Nic) -> Option<Value> {
    let mac = nic.mac.filter(|_| nic.vlan.is_none() && nic.bond.is_none())?;
    let ipv4 = json!({ "ipAddress": entries(nic, true), "subnet": subnets(nic, true) });
    let mut ipv6 = json!({ "ipAddress": entries(nic, false) });
    let subnets = subnets(nic, false);
    if !subnets.is_empty() {
        ipv6["subnet"] = subnets.into();
    }
    let mac = mac.to_string().replace(':', "").to_uppercase();
    Some(json!({ "ipv4": ipv4, "ipv6": ipv6, "macAddress": mac }))
}

fn of_family(nic: &Nic, v4: bool) -> impl Iterator<Item = &Address> {
    nic.addresses.iter().filter(move |entry| match entry.address {
        Some(cidr) => cidr.address.is_ipv4() == v4,
        // The lease is unknown, but an entry makes cloud-init request one.
        None => entry.method == if v4 { Method::Dhcp4 } else { Method::Dhcp6 },
    })
}

fn entries(nic: &Nic, v4: bool) -> Vec<Value> {
    let entry = |address: &Address| {
        let mut entry = json!({});
        if let Some(cidr) = address.address {
            entry["privateIpAddress"] = cidr.address.to_string().into();
        }
        if v4 {
            let public = address.public.filter(|public| public.0.is_ipv4());
            entry["publicIpAddress"] = public.map_or_else(String::new, |public| public.to_string()).into();
        } else if let Some(public) = public_ipv6(address) {
            // Not part of Azure's interface, but systemd reads it.
            entry["publicIpAddress"] = public.to_string().into();
        }
        entry
    };
    // cloud-init requests the first address by DHCP and configures the others statically.
    let mut sorted: Vec<&Address> = of_family(nic, v4).collect();
    sorted.sort_by_key(|address| address.address.is_some());
    let unknown = sorted.iter().filter(|address| address.address.is_none()).count();
    sorted.into_iter().skip(unknown.saturating_sub(1)).map(entry).collect()
}

/// Returns the address that reaches the entry from outside: a translated one, or its own.
fn public_ipv6(address: &Address) -> Option<IpAddr> {
    let own = |address: &IpAddr| match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(v6) => !v6.is_unique_local() && !v6.is_unicast_link_local(),
    };
    let translated = address.public.map(|public| public.0).filter(IpAddr::is_ipv6);
    translated.or_else(|| Some(address.address?.address).filter(own))
}

fn subnets(nic: &Nic, v4: bool) -> Vec<Value> {
    let subnet =
        |cidr: Cidr| json!({ "address": network(cidr).to_string(), "prefix": cidr.prefix.to_string() });
    of_family(nic, v4).filter_map(|address| address.address).map(subnet).collect()
}

/// Returns the first address of the network.
fn network(cidr: Cidr) -> IpAddr {
    let bits = u32::from(cidr.prefix);
    match cidr.address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
            IpAddr::V4((address.to_bits() & mask).into())
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
            IpAddr::V6((address.to_bits() & mask).into())
        }
    }
}
