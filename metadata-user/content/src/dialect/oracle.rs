//! Oracle: two JSON documents and every part of them, in two trees.
//!
//! Version 2 requires a header field that an attacker cannot make a web application send, and refuses requests through
//! a proxy. Version 1 requires nothing and can be switched off. Neither contains credentials.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

use super::common::{IpVersion, gateway, given, known, link_local, public_key_lines, speaks};
use super::document::DocumentTree;
use super::route_builder::{RouteBuilder, computed};
use super::{AccessCondition, Description, Mount};
use crate::dialect::json::json;
use crate::http::{Response, StatusCode};
use crate::record::values::{Cidr, NicMac};
use crate::record::vm::Payload;
use crate::record::{Nic, ORACLE_KEYS, OnOff, Record};
use crate::store::{Condition, LiveRequest, LiveRoute, Methods, RequestGuard};

pub(super) static DIALECT: Description = Description::new(
    &[
        Mount::open("/opc/v2").needs(AccessCondition::Field("Authorization", "Bearer Oracle")),
        Mount::open("/opc/v1"),
    ],
    "`DataSourceOracle`; systemd-imdsd",
    render,
)
.remark("`/opc/v1` unless `serve.opc_v1` is `off`");

static GUARDS: LazyLock<[RequestGuard; 4]> = LazyLock::new(|| {
    let absent = |name| RequestGuard {
        condition: Condition::HeaderAbsent { name },
        otherwise: Response::error(StatusCode(403), &[]),
    };
    [
        absent("Forwarded"),
        absent("X-Forwarded-For"),
        absent("X-Forwarded-Host"),
        RequestGuard {
            condition: Condition::HeaderIs { name: "Authorization", value: "Bearer Oracle" },
            otherwise: Response::error(StatusCode(401), &[]),
        },
    ]
});

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let instance = match instance(record) {
        Some(instance) => DocumentTree::of(routes.document(&instance)),
        None => DocumentTree::unread(routes.unread()),
    };
    let vnics = DocumentTree::of(routes.document(&vnics(record)));
    routes.live_below("/opc/v2/instance", Methods::READ, &*GUARDS, instance.clone());
    // systemd's client reads user-data at this path, outside the instance.
    let in_instance = instance.clone();
    let user_data = computed("the user-data of the instance", move |call| {
        in_instance.answer(&LiveRequest { rest: "/metadata/user_data", ..*call })
    });
    routes.live("/opc/v2/metadata/user_data", Methods::READ, &*GUARDS, user_data);
    routes.live_below("/opc/v2/vnics", Methods::READ, &*GUARDS, vnics.clone());
    if record.serve.opc_v1 == OnOff::On {
        routes.live_below("/opc/v1/instance", Methods::READ, &[], instance);
        routes.live_below("/opc/v1/vnics", Methods::READ, &[], vnics);
    }
}

/// Returns the document; `None` while the source of the user-data has not been read.
fn instance(record: &Record) -> Option<Value> {
    let (region, zone) = (record.placement.region.as_str(), record.placement.zone.as_str());
    let mut document = json!({
        "agentConfig": {},
        "availabilityDomain": zone,
        "canonicalRegionName": region,
        "compartmentId": record.vm.project.id.as_str(),
        "displayName": record.vm.name.as_str(),
        "faultDomain": fault_domain(record),
        "hostname": record.hostname.short.as_str(),
        "id": record.ocid(),
        "metadata": metadata(record)?,
        "ociAdName": zone,
        "region": region,
        "shape": record.instance_type(),
        "state": "Running",
        "timeCreated": 0,
    });
    if let Some(image) = &record.image {
        document["image"] = image.id.as_str().into();
    }
    Some(document)
}

/// Maps 0 to `FAULT-DOMAIN-1`, 1 to `FAULT-DOMAIN-2` and so on. Other names stay.
fn fault_domain(record: &Record) -> String {
    let name = record.placement.fault_domain.as_ref().map_or("0", |name| name.as_str());
    name.parse::<u32>().map_or_else(|_| name.to_owned(), |n| format!("FAULT-DOMAIN-{}", u64::from(n) + 1))
}

/// Returns the custom keys, the public keys and the user-data.
fn metadata(record: &Record) -> Option<Value> {
    let custom = record.metadata.0.iter().filter(|(key, _)| !ORACLE_KEYS.contains(&key.as_str()));
    let mut metadata: Map<String, Value> =
        custom.map(|(key, value)| (key.clone(), value.as_str().into())).collect();
    if !record.ssh_keys.is_empty() {
        metadata.insert("ssh_authorized_keys".into(), public_key_lines(record).into());
    }
    if let Some(user_data) = &record.user_data {
        let bytes = Payload::bytes(user_data)?;
        metadata.insert("user_data".into(), STANDARD.encode(bytes).into());
    }
    Some(metadata.into())
}

/// Returns the first NIC, and the others with a known address: cloud-init configures those with what is known.
fn vnics(record: &Record) -> Value {
    let given = given(&record.network).enumerate();
    given.filter_map(|(position, (n, nic, mac))| vnic(position == 0, n, nic, mac)).collect()
}

/// Returns one NIC. cloud-init (`DataSourceOracle.py`) requires `subnetCidrBlock`: without it in one NIC, the guest
/// configures neither that NIC nor those after it. It configures the first NIC by DHCP, and by DHCPv6 alone if there is
/// an IPv6 router (24.4 and 25.1: an IPv6 subnet) and no `privateIp`. It then reads the first IPv6 address.
fn vnic(is_first: bool, n: usize, nic: &Nic, mac: NicMac) -> Option<Value> {
    let v4 = known(nic, IpVersion::V4).next();
    let mut v6: Vec<Cidr> = known(nic, IpVersion::V6).map(|(_, cidr)| cidr).collect();
    let mut router6 = known(nic, IpVersion::V6).next().map(|(address, _)| gateway(address));
    let only_v6 = is_first && speaks(nic, IpVersion::V6) && !speaks(nic, IpVersion::V4);
    if only_v6 {
        // Without a router the client would ask for an IPv4 lease. What the record does not know has a stand-in.
        if v6.is_empty() {
            v6.push(Cidr { address: link_local(mac).into(), prefix: 64 });
        }
        router6 = Some(router(nic, v6[0]));
    }
    let is_leased = is_first && v4.is_none() && !only_v6;
    let mut vnic = json!({ "macAddr": mac.to_string(), "vlanTag": n, "vnicId": nic.eni_id() });
    let block = |cidr: Cidr| cidr.network().to_string();
    match (v4, v6.first()) {
        (Some((_, cidr)), _) => vnic["subnetCidrBlock"] = block(cidr).into(),
        (None, Some(cidr)) if !is_leased => vnic["subnetCidrBlock"] = block(*cidr).into(),
        _ => vnic["subnetCidrBlock"] = "0.0.0.0/0".into(),
    }
    if let Some((address, cidr)) = v4 {
        vnic["privateIp"] = cidr.address.to_string().into();
        vnic["virtualRouterIp"] = gateway(address).into();
    }
    if let Some(cidr) = v6.first() {
        vnic["ipv6Addresses"] = v6.iter().map(|cidr| cidr.address.to_string()).collect();
        if !is_leased {
            vnic["ipv6SubnetCidrBlock"] = block(*cidr).into();
            vnic["ipv6VirtualRouterIp"] = router6.into();
        }
    }
    (is_first || v4.is_some() || !v6.is_empty()).then_some(vnic)
}

/// Returns the IPv6 router of a NIC without IPv4: its gateway, else the address that every router of the subnet has
/// (RFC 4291 section 2.6.1).
fn router(nic: &Nic, cidr: Cidr) -> String {
    let own = nic.addresses.iter().find_map(|address| address.gateway);
    own.map_or_else(|| cidr.network().address.to_string(), |own| own.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::dialect::tests::{ask_with, full, rendered};
    use crate::http::{Method, Response};
    use crate::store::Responses;

    const BEARER: (&str, &str) = ("Authorization", "Bearer Oracle");

    fn get(responses: &Responses, path: &str, fields: &[(&str, &str)]) -> Response {
        ask_with(responses, Method::Get, path, fields, b"")
    }

    fn document(record: &Value, name: &str) -> Value {
        let answer = get(&rendered(record), &format!("/opc/v2/{name}"), &[BEARER]);
        assert_eq!(answer.status().0, 200, "{name}");
        serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
    }

    #[test]
    fn version_2_requires_the_header_and_refuses_proxies_on_every_path() {
        let responses = rendered(&full());
        for path in ["/opc/v2/instance", "/opc/v2/instance/id", "/opc/v2/instance/nope", "/opc/v2/vnics/0"] {
            for (fields, status) in [
                (vec![], 401),
                (vec![("Authorization", "Bearer oracl")], 401),
                (vec![("Authorization", "")], 401),
                (vec![BEARER, ("Forwarded", "for=1.2.3.4")], 403),
                (vec![BEARER, ("x-forwarded-for", "")], 403),
                (vec![BEARER, ("X-Forwarded-Host", "h")], 403),
                (vec![("X-Forwarded-Host", "h")], 403),
            ] {
                assert_eq!(get(&responses, path, &fields).status().0, status, "{path} {fields:?}");
            }
        }
        assert_eq!(get(&responses, "/opc/v2/instance/nope", &[BEARER]).status().0, 404);
        assert_eq!(ask_with(&responses, Method::Put, "/opc/v2/instance", &[BEARER], b"").status().0, 405);
    }

    #[test]
    fn version_1_has_the_same_content_without_a_header_and_can_be_off() {
        let mut record = full();
        let responses = rendered(&record);
        for path in ["instance", "instance/metadata/role", "vnics", "vnics/1/macAddr"] {
            let first = get(&responses, &format!("/opc/v1/{path}"), &[]);
            let second = get(&responses, &format!("/opc/v2/{path}"), &[BEARER]);
            assert_eq!((first.status().0, &first), (200, &second), "{path}");
        }
        record["serve"]["opc_v1"] = json!("off");
        let responses = rendered(&record);
        for path in ["instance", "instance/id", "vnics"] {
            assert_eq!(get(&responses, &format!("/opc/v1/{path}"), &[BEARER]).status().0, 404, "{path}");
        }
    }

    #[test]
    fn generated_keys_override_metadata_and_absent_ones_are_left_out() {
        let mut record = full();
        record["metadata"] = json!({"user_data": "evil", "ssh_authorized_keys": "evil", "role": "web"});
        let metadata = document(&record, "instance/metadata");
        assert!(!metadata.to_string().contains("evil"), "{metadata}");
        record["ssh_keys"] = json!([{"name": "a", "key": "ssh-rsa A"}, {"name": "b", "key": "ssh-rsa B"}]);
        assert_eq!(document(&record, "instance/metadata")["ssh_authorized_keys"], "ssh-rsa A\nssh-rsa B");
        for field in ["user_data", "ssh_keys", "image"] {
            record.as_object_mut().expect("a mapping").remove(field);
        }
        let instance = document(&record, "instance");
        assert_eq!((&instance["metadata"], instance.get("image")), (&json!({"role": "web"}), None));
    }

    #[test]
    fn numeric_fault_domains_are_counted_from_one() {
        for (domain, name) in [
            (Value::Null, "FAULT-DOMAIN-1"),
            (json!("2"), "FAULT-DOMAIN-3"),
            (json!("4294967295"), "FAULT-DOMAIN-4294967296"),
            (json!("rack-7"), "rack-7"),
        ] {
            let mut record = full();
            record["placement"]["fault_domain"] = domain;
            assert_eq!(document(&record, "instance")["faultDomain"], name);
        }
    }

    #[test]
    fn vnics_have_the_known_addresses_of_each_version() {
        let mut record = full();
        record["network"]["nics"] = json!([
            {"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [
                {"method": "static", "address": "2001:db8::15/64", "gateway": "fe80::1"},
                {"method": "static", "address": "2001:db8::16/64"}]},
            {"id": "n1", "mac": "52:54:00:12:34:57", "addresses": [{"method": "dhcp4"}]},
            {"id": "n2", "mac": "52:54:00:12:34:58", "addresses": [{"method": "static", "address": "10.0.0.5/24"}]},
            {"id": "n3", "bond": {"links": ["n0", "n1"], "mode": "802.3ad"}},
        ]);
        let vnics = document(&record, "vnics");
        let expected = json!([
            {
                "ipv6Addresses": ["2001:db8::15", "2001:db8::16"], "ipv6SubnetCidrBlock": "2001:db8::/64",
                "ipv6VirtualRouterIp": "fe80::1", "macAddr": "52:54:00:12:34:56", "subnetCidrBlock": "2001:db8::/64",
                "vlanTag": 0, "vnicId": "eni-d4dd82cf2995e2454",
            },
            {
                "macAddr": "52:54:00:12:34:58", "privateIp": "10.0.0.5", "subnetCidrBlock": "10.0.0.0/24",
                "virtualRouterIp": "", "vlanTag": 2, "vnicId": vnics[1]["vnicId"],
            },
        ]);
        assert_eq!(vnics, expected);
    }

    #[test]
    fn a_first_nic_with_an_unknown_lease_has_a_subnet_and_no_ipv6_router() {
        let leased = json!({"method": "dhcp4"});
        let fixed = json!({"method": "static", "address": "2001:db8::15/64", "gateway": "fe80::1"});
        for addresses in [json!([]), json!([leased]), json!([leased, fixed])] {
            let mut record = full();
            record["network"]["nics"] =
                json!([{"id": "n0", "mac": "52:54:00:12:34:56", "addresses": addresses}]);
            let vnic = document(&record, "vnics")[0].clone();
            assert_eq!(vnic["subnetCidrBlock"], "0.0.0.0/0", "{addresses}");
            for absent in ["privateIp", "ipv6VirtualRouterIp", "ipv6SubnetCidrBlock"] {
                assert!(vnic.get(absent).is_none(), "{absent} of {addresses}");
            }
        }
    }

    #[test]
    fn a_first_nic_with_ipv6_alone_has_an_address_and_a_router_whatever_the_record_knows() {
        let (own, fixed, subnet) = ("fe80::5054:ff:fe12:3456", "2001:db8::15/64", "2001:db8::/64");
        for (addresses, address, subnet, router) in [
            (json!([{"method": "slaac"}]), own, "fe80::/64", "fe80::"),
            (json!([{"method": "dhcp6", "gateway": "fe80::1"}]), own, "fe80::/64", "fe80::1"),
            (json!([{"method": "static", "address": fixed}]), "2001:db8::15", subnet, "2001:db8::"),
            (
                json!([{"method": "slaac", "address": fixed, "gateway": "fe80::1"}]),
                "2001:db8::15",
                subnet,
                "fe80::1",
            ),
        ] {
            let mut record = full();
            record["network"]["nics"] =
                json!([{"id": "n0", "mac": "52:54:00:12:34:56", "addresses": addresses}]);
            let vnic = document(&record, "vnics")[0].clone();
            assert_eq!(
                (&vnic["ipv6Addresses"][0], &vnic["ipv6VirtualRouterIp"]),
                (&json!(address), &json!(router))
            );
            for block in ["subnetCidrBlock", "ipv6SubnetCidrBlock"] {
                assert_eq!(vnic[block], subnet, "{block} of {addresses}");
            }
            assert!(vnic.get("privateIp").is_none(), "{addresses}");
        }
    }

    #[test]
    fn unread_user_data_is_503() {
        let mut record = full();
        record["user_data"] = json!({"source": {"file": "user-data"}});
        let responses = rendered(&record);
        for (path, status) in [("instance", 503), ("instance/metadata/user_data", 503), ("vnics", 200)] {
            assert_eq!(get(&responses, &format!("/opc/v2/{path}"), &[BEARER]).status().0, status, "{path}");
        }
    }
}
