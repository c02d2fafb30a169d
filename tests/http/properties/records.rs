//! Random valid records with any subset of the members and with unusual values.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_content::record::Record;
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value, json};

/// A record and the data in it.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    pub(crate) value: Value,
    pub(crate) record: Record,
    /// User-data in bytes, before any encoding.
    pub(crate) user_data: Option<Vec<u8>>,
    pub(crate) vendor_data: Option<Vec<u8>>,
}

/// One line with any characters that a line may hold.
fn line() -> impl Strategy<Value = String> {
    prop_oneof![3 => "[a-z][a-z0-9-]{0,12}", 1 => "[^\\p{Cc}]{1,20}"]
}

fn label() -> impl Strategy<Value = String> {
    "[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?"
}

/// Bytes of user-data: text, text that looks like base64, gzip, and random bytes.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(Vec::new()),
        "#cloud-config\n[ -~]{0,60}\n".prop_map(String::into_bytes),
        any::<String>().prop_map(String::into_bytes),
        select(vec!["test", "abcd", "dGVzdA==", "{\"a\":1}", "\0", "a\0b"]).prop_map(|text| text.into()),
        vec(any::<u8>(), 0..700),
        vec(any::<u8>(), 0..60).prop_map(|tail| [&[0x1f, 0x8b, 8, 0], &tail[..]].concat()),
        // This is longer than the data that documents hold in line.
        vec(any::<char>(), 600..900).prop_map(|chars| chars.into_iter().collect::<String>().into_bytes()),
    ]
}

/// Data as text if it is UTF-8 and `as_text` is set, otherwise in base64.
fn payload(bytes: &[u8], as_text: bool) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) if as_text => json!({ "text": text }),
        _ => json!({ "base64": STANDARD.encode(bytes) }),
    }
}

fn metadata() -> impl Strategy<Value = BTreeMap<String, String>> {
    let odd = "0 00 1-x . .. _index - instance-id dsmode user-data ssh-keys user_data \
               ssh_authorized_keys admin_pass startup-script iam latest";
    let odd: Vec<_> = odd.split(' ').collect();
    let key = prop_oneof![2 => "[A-Za-z0-9._-]{1,12}", 1 => select(odd).prop_map(str::to_owned)];
    let value = prop_oneof![2 => "[ -~]{0,20}", 1 => any::<String>(), 1 => "[a-z]\n[a-z]\n?"];
    btree_map(key, value, 0..6)
}

fn keys() -> impl Strategy<Value = Vec<Value>> {
    let name = prop_oneof![3 => "[a-z]{1,8}", 1 => "[^\\p{Cc}=]{1,12}"];
    let key = prop_oneof![3 => "ssh-ed25519 AAAA[A-Za-z0-9+/]{20} [a-z@.]{1,9}", 1 => "[^\\p{Cc}]{1,30}"];
    let key = (name, key, option::of(line()));
    vec(
        key.prop_map(|(name, key, user)| without_nulls(json!({ "name": name, "key": key, "user": user }))),
        0..4,
    )
}

/// Removes all members that are null.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(members) => {
            let kept = members.into_iter().filter(|(_, value)| !value.is_null());
            kept.map(|(name, value)| (name, without_nulls(value))).collect::<Map<_, _>>().into()
        }
        other => other,
    }
}

fn v4() -> impl Strategy<Value = std::net::Ipv4Addr> {
    any::<u32>().prop_map(std::net::Ipv4Addr::from_bits)
}

fn v6() -> impl Strategy<Value = std::net::Ipv6Addr> {
    any::<u128>().prop_map(std::net::Ipv6Addr::from_bits)
}

fn address() -> impl Strategy<Value = Value> {
    let v4s = (v4(), 0..=32_u8, option::of(v4()), option::of(v4()));
    let v6s = (v6(), 0..=128_u8, option::of(v6()), option::of(v6()));
    let entry = |method: &str, address: Option<String>, gateway: Option<String>, public: Option<String>| {
        without_nulls(json!({ "method": method, "address": address, "gateway": gateway, "public": public }))
    };
    prop_oneof![
        (select(vec!["static", "dhcp4"]), v4s).prop_map(
            move |(method, (address, prefix, gateway, public))| {
                let text = |ip: std::net::Ipv4Addr| ip.to_string();
                entry(method, Some(format!("{address}/{prefix}")), gateway.map(text), public.map(text))
            }
        ),
        (select(vec!["static", "dhcp6", "slaac"]), v6s).prop_map(
            move |(method, (address, prefix, gateway, public))| {
                let text = |ip: std::net::Ipv6Addr| ip.to_string();
                entry(method, Some(format!("{address}/{prefix}")), gateway.map(text), public.map(text))
            }
        ),
        select(vec!["dhcp4", "dhcp6", "slaac"]).prop_map(move |method| entry(method, None, None, None)),
    ]
}

fn route() -> impl Strategy<Value = Value> {
    prop_oneof![
        (v4(), 0..=32_u8, v4(), option::of(any::<u32>())).prop_map(|(to, prefix, via, metric)| (
            format!("{to}/{prefix}"),
            via.to_string(),
            metric
        )),
        (v6(), 0..=128_u8, v6(), option::of(any::<u32>())).prop_map(|(to, prefix, via, metric)| (
            format!("{to}/{prefix}"),
            via.to_string(),
            metric
        )),
    ]
    .prop_map(|(to, via, metric)| without_nulls(json!({ "to": to, "via": via, "metric": metric })))
}

/// The optional members of a NIC.
fn nic() -> impl Strategy<Value = Value> {
    (
        option::of("[a-z]{1,4}"),
        option::of(1280..=9_000_u16),
        option::of(line()),
        option::of(select(vec!["public", "private"])),
        vec(address(), 0..4),
        vec(route(), 0..2),
    )
        .prop_map(|(name, mtu, network_id, role, addresses, routes)| {
            without_nulls(json!({
                "name": name, "mtu": mtu, "network_id": network_id, "role": role, "addresses": addresses,
                "routes": routes,
            }))
        })
}

/// Physical NICs, with an optional bond of the first two and an optional VLAN on the first.
fn nics() -> impl Strategy<Value = Vec<Value>> {
    let odd_id = prop_oneof![4 => Just(""), 1 => Just(":._-")];
    let mode = select(vec!["balance-rr", "active-backup", "802.3ad", "balance-alb"]);
    let bond = option::of((mode, option::of(any::<u32>()), option::of(select(vec!["slow", "fast"]))));
    (vec(nic(), 0..5), odd_id, option::of((nic(), 1..4_000_u16)), (nic(), bond)).prop_map(
        |(mut nics, odd, vlan, (upper, bond))| {
            for (n, nic) in nics.iter_mut().enumerate() {
                nic["id"] = json!(format!("n{n}{odd}"));
                // The names of NICs must be unique.
                if let Some(name) = nic["name"].as_str().map(str::to_owned) {
                    nic["name"] = json!(format!("{name}{n}"));
                }
                nic["mac"] = json!(format!("52:54:00:12:34:{n:02x}"));
            }
            if let (Some((mut vlan, number)), [first, ..]) = (vlan, &nics[..]) {
                vlan["id"] = json!("tagged");
                vlan["name"] = json!("tag.7");
                vlan["vlan"] = json!({ "link": first["id"], "id": number });
                nics.push(vlan);
            }
            if let (Some((mode, miimon, rate)), [first, second, ..]) = (bond, &nics[..]) {
                let mut upper = upper;
                upper["id"] = json!("together");
                upper["name"] = json!("bond0");
                upper["bond"] = without_nulls(json!({
                    "links": [first["id"], second["id"]], "mode": mode, "miimon": miimon, "lacp_rate": rate,
                }));
                nics.push(upper);
            }
            nics
        },
    )
}

fn network() -> impl Strategy<Value = Value> {
    let raw = select(vec![
        json!("version: 2\nethernets: {eth0: {dhcp4: true}}\n"),
        json!({ "version": 1, "config": [] }),
        json!({ "network": { "version": 2 } }),
    ]);
    let resolver = prop_oneof![v4().prop_map(|ip| ip.to_string()), v6().prop_map(|ip| ip.to_string())];
    let mode = prop_oneof![4 => Just("auto"), 1 => Just("none"), 1 => Just("raw")];
    let data = option::of(select(vec![
        json!(r#"{"links": [{"id": "a"}], "networks": []}"#),
        json!({ "links": [{ "id": "a" }], "networks": [], "services": [] }),
    ]));
    let given = (mode, raw, data).prop_map(|(mode, raw, data)| match mode {
        "raw" => json!({ "mode": mode, "raw": raw, "network_data": data }),
        mode => json!({ "mode": mode }),
    });
    (given, vec(resolver, 0..3), vec(label(), 0..3), nics()).prop_map(|(mut network, dns, search, nics)| {
        network["dns"] = json!(dns);
        network["search"] = json!(search);
        network["nics"] = json!(nics);
        without_nulls(network)
    })
}

fn disks() -> impl Strategy<Value = Vec<Value>> {
    let disk = (line(), line(), line(), option::of(line()), vec(line(), 0..2));
    let disk = disk.prop_map(|(kind, bus, address, serial, tags)| {
        without_nulls(json!({ "type": kind, "bus": bus, "address": address, "serial": serial, "tags": tags }))
    });
    vec(disk, 0..3)
}

fn files() -> impl Strategy<Value = Vec<Value>> {
    let file = (line(), vec(any::<u8>(), 0..40));
    vec(file.prop_map(|(path, bytes)| json!({ "path": path, "base64": STANDARD.encode(bytes) })), 0..3)
}

/// A time after or before the time of the requests.
fn moment() -> impl Strategy<Value = &'static str> {
    select(vec!["2030-01-01T00:00:00Z", "2020-01-01T00:00:00+02:00"])
}

fn credentials() -> impl Strategy<Value = Value> {
    let token = (option::of("[!-~]{1,40}"), moment());
    let iam =
        ("[a-z][a-z0-9_+=,.@-]{0,9}", "[A-Z0-9]{4,12}", "[!-~]{4,30}", option::of("[!-~]{4,30}"), moment());
    let account = (label(), option::of("[a-z]{1,5}@[a-z]{1,5}"), vec(line(), 0..3), token);
    let maas = ("[A-Za-z0-9]{4,9}", "[A-Za-z0-9]{4,9}", "[A-Za-z0-9]{4,9}");
    (option::of(iam), option::of(account), option::of(maas)).prop_map(|(iam, account, maas)| {
        let iam = iam.map(|(role, id, key, token, expires)| {
            json!({
                "role": role, "access_key_id": id, "secret_access_key": key, "session_token": token,
                "expires": expires, "updated": "2019-01-01T00:00:00Z",
            })
        });
        let account = account.map(|(name, email, scopes, (text, expires))| {
            let token = text.map(|text| json!({ "text": text, "expires": expires }));
            json!({ "name": name, "email": email, "scopes": scopes, "token": token })
        });
        let maas = maas.map(|(consumer, key, secret)| {
            json!({ "consumer_key": consumer, "token_key": key, "token_secret": secret })
        });
        without_nulls(json!({ "iam": iam, "service_account": account, "maas": maas }))
    })
}

fn serving() -> impl Strategy<Value = Value> {
    (
        select(vec!["off", "optional", "required"]),
        any::<bool>(),
        prop_oneof![4 => Just("ec2"), 1 => Just("cloudstack")],
        prop_oneof![Just(204), Just(404)],
        (any::<bool>(), any::<bool>()),
        select(vec!["on", "off"]),
        1..=64_u8,
    )
        .prop_map(|(imdsv2, v1, tree, absent, (gce_root, eni), opc_v1, hop_limit)| {
            json!({
                "imdsv2": imdsv2, "imdsv1_credentials": v1, "date_tree": tree, "absent_seed": absent,
                "gce_root": gce_root, "legacy_eni": eni, "opc_v1": opc_v1, "hop_limit": hop_limit,
            })
        })
}

/// Identity and placement of a VM, with unusual values.
fn identity() -> impl Strategy<Value = Value> {
    let vm = (any::<u128>(), line(), option::of(line()), option::of(line()), option::of("i-[0-9a-f]{8,17}"));
    let number = (option::of(1..1_u64 << 53), any::<u64>(), "[0-9]{12}", line());
    let placement = (line(), line(), option::of(line()), option::of(line()));
    let kind = (option::of(line()), option::of(line()), option::of((line(), option::of(line()))));
    let host = (label(), option::of("[a-z]{1,8}(\\.[a-z]{1,4})?"));
    (vm, number, placement, kind, host).prop_map(
        |(
            (uuid, name, namespace, instance_id, ec2_id),
            (numeric_id, project_number, account, project),
            (region, zone, host, fault_domain),
            (instance_type, arch, image),
            (short, domain),
        )| {
            let hex = format!("{uuid:032x}");
            let groups = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
            json!({
                "schema": "vmrecord/1",
                "generation": 1,
                "vm": {
                    "uuid": groups.join("-"), "name": name, "namespace": namespace,
                    "instance_id": instance_id, "ec2_id": ec2_id, "numeric_id": numeric_id,
                    "project": { "id": project, "number": project_number, "account": account },
                },
                "hostname": { "short": short, "domain": domain },
                "placement": { "region": region, "zone": zone, "host": host, "fault_domain": fault_domain },
                "instance_type": instance_type,
                "arch": arch,
                "image": image.map(|(id, name)| json!({ "id": id, "name": name })),
            })
        },
    )
}

/// A record with only the required members.
pub(crate) fn bare() -> impl Strategy<Value = Record> {
    identity().prop_map(|mut record| {
        let members = record.as_object_mut().expect("a record is a mapping");
        members.retain(|name, _| {
            matches!(name.as_str(), "schema" | "generation" | "vm" | "hostname" | "placement")
        });
        parse(record)
    })
}

/// Any record that serves every dialect.
pub(crate) fn any_record() -> impl Strategy<Value = Given> {
    let data = (option::of(bytes()), option::of(bytes()), option::of(bytes()), any::<bool>());
    let admin = option::of((option::of(line()), option::of("[!-~]{6,20}")));
    let lists = (keys(), metadata(), vec(line(), 0..3), disks(), files());
    let rest = (option::of(vec(any::<u8>(), 0..40)), credentials(), serving());
    (identity(), data, admin, lists, network(), rest).prop_map(
        |(
            mut record,
            (user, vendor, vendor2, as_text),
            admin,
            lists,
            network,
            (seed, credentials, serve),
        )| {
            let (keys, metadata, labels, disks, files) = lists;
            let mut set = |name: &str, value: Value| record[name] = value;
            let payload = |bytes: &Option<Vec<u8>>| bytes.as_ref().map(|bytes| payload(bytes, as_text));
            set("user_data", json!(payload(&user)));
            set("vendor_data", json!(payload(&vendor)));
            set("vendor_data2", json!(payload(&vendor2)));
            set("admin", json!(admin.map(|(user, password)| json!({ "user": user, "password": password }))));
            set("ssh_keys", json!(keys));
            set("metadata", json!(metadata));
            set("labels", json!(labels));
            set("disks", json!(disks));
            set("files", json!(files));
            set("network", network);
            set("random_seed", json!(seed.map(|seed| json!({ "base64": STANDARD.encode(seed) }))));
            set("credentials", credentials);
            set("serve", serve);
            Given { record: parse(record.clone()), value: record, user_data: user, vendor_data: vendor }
        },
    )
}

/// Parses a record without its null members.
pub(crate) fn parse(record: Value) -> Record {
    let text = without_nulls(record).to_string();
    match Record::parse("random.json", &text) {
        Ok((record, _)) => record,
        Err(error) => panic!("{error} in {text}"),
    }
}
