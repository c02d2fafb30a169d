//! The record of a typical VM: its own name, keys, MACs, addresses and 300 bytes of user-data, and 16 KiB of
//! vendor-data that all VMs share.

use metadata_content::record::Dialect;
use serde_json::{Value, json};

const USER_DATA: usize = 300;
const VENDOR_DATA: usize = 16 << 10;

/// The record of VM `number`, for these dialects or for all.
#[must_use]
pub fn record(number: u32, dialects: Option<&[Dialect]>) -> Value {
    let user_data = format!("#cloud-config\n# of VM {number}\n{:x<USER_DATA$}", "- ");
    let vendor_data = format!("#cloud-config\n{}", "# the same for every \"VM\"\n".repeat(VENDOR_DATA));
    let [_, a, b, c] = number.to_be_bytes();
    let key = |name: &str| {
        let bytes = format!("AAAAC3NzaC1lZDI1NTE5AAAAI{name:0<8}{number:035}");
        json!({ "name": name, "key": format!("ssh-ed25519 {bytes} {name}@{number}") })
    };
    let nic = |n: usize, network: &str, addresses: Value| {
        json!({
            "id": format!("n{n}"), "name": format!("eth{n}"), "mtu": 1500, "network_id": network,
            "mac": format!("52:54:{n:02x}:{a:02x}:{b:02x}:{c:02x}"), "addresses": addresses,
        })
    };
    let mut record = json!({
        "schema": "vmrecord/1",
        "generation": 1,
        "vm": {
            "uuid": format!("7c0f1a52-3b5e-4d1a-9d2c-{number:012x}"),
            "name": format!("web-{number}"),
            "namespace": "default",
            "project": { "id": "p1", "number": 1, "account": "000000000000" },
        },
        "hostname": { "short": format!("web-{number}"), "domain": "example.internal" },
        "placement": { "region": "local", "zone": "local-a", "fault_domain": "0" },
        "instance_type": "std.small",
        "image": { "id": "debian-13" },
        "admin": { "user": "alice" },
        "ssh_keys": [key("alice")],
        "user_data": { "text": &user_data[..USER_DATA] },
        "vendor_data": { "text": &vendor_data[..VENDOR_DATA] },
        "network": {
            "dns": ["10.0.2.3"],
            "search": ["example.internal"],
            "nics": [
                nic(0, "net-a", json!([
                    {
                        "method": "dhcp4", "address": format!("10.{a}.{b}.{c}/8"), "gateway": "10.0.0.1",
                        "public": format!("203.{a}.{b}.{c}"),
                    },
                    {
                        "method": "static", "address": format!("2001:db8::{number:x}/64"),
                        "gateway": "fe80::1",
                    },
                ])),
                nic(1, "net-b", json!([{ "method": "static", "address": format!("192.{a}.{b}.{c}/16") }])),
            ],
        },
        "metadata": { "role": "web", "owner": format!("team-{number}") },
        "labels": ["web"],
        "disks": [
            { "type": "disk", "bus": "virtio", "address": "0000:00:04.0", "serial": format!("d{number}") },
        ],
        "credentials": {
            "iam": {
                "role": "app", "access_key_id": format!("AKID{number}"),
                "secret_access_key": format!("secret-{number}"), "expires": "2030-01-01T00:00:00Z",
            },
            "service_account": {
                "name": "web", "email": format!("web-{number}@p1.local"), "scopes": ["cloud-platform"],
                "token": {
                    "text": format!("eyJhbGciOiJub25lIn0.{number}."), "expires": "2030-01-01T00:00:00Z",
                },
            },
        },
    });
    if let Some(dialects) = dialects {
        record["serve"] = json!({ "dialects": dialects.iter().map(|d| d.as_str()).collect::<Vec<_>>() });
    }
    record
}
