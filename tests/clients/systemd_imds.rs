//! systemd's unmodified metadata client (`systemd-imds`) gets each key it knows from each cloud that the agent serves.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use support::agent::{Agent, PortArgument};
use support::answers;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::record::{Identity, replace};
use support::systemd_imds::SystemdImds;

const PUBLIC_V4: &str = "203.0.113.7";
const PUBLIC_V6: &str = "2001:db8::7";

/// Clouds in the client's table for which the agent has no dialect.
const OTHERS: [&str; 1] = ["tencent-cloud"];

fn record(identity: &Identity) -> Value {
    let mut record: Value = serde_json::from_str(&identity.record(1)).expect("a record");
    let addresses = &mut record["network"]["nics"][0]["addresses"];
    addresses[0]["public"] = PUBLIC_V4.into();
    addresses.as_array_mut().expect("a list").push(json!({
        "method": "static",
        "address": format!("{PUBLIC_V6}/64"),
        "gateway": "2001:db8::1",
    }));
    // The client requests a token for each cloud whose table entry names a token.
    record["serve"] = json!({ "imdsv2": "required" });
    record
}

/// The expected value of each key, by cloud. Other keys are not checked.
fn expected(identity: &Identity) -> BTreeMap<&'static str, Vec<(&'static str, String)>> {
    let short = || identity.hostname.clone();
    let fqdn = || format!("{}.{}", identity.hostname, answers::DOMAIN);
    let (region, zone) = (|| "local".to_owned(), || "local-a".to_owned());
    let (v4, v6) = (|| PUBLIC_V4.to_owned(), || PUBLIC_V6.to_owned());
    let (key, user_data) = (|| identity.ssh_key.clone(), || identity.user_data.clone());
    let base64 = || STANDARD.encode(&identity.user_data);
    BTreeMap::from([
        (
            "amazon-ec2",
            vec![
                ("hostname", fqdn()),
                ("region", region()),
                ("zone", zone()),
                ("ipv4-public", v4()),
                ("ipv6-public", v6()),
                ("ssh-key", key()),
                ("userdata", user_data()),
            ],
        ),
        (
            "microsoft-azure",
            vec![
                ("hostname", short()),
                ("region", region()),
                ("zone", zone()),
                ("ipv4-public", v4()),
                ("ipv6-public", v6()),
                ("ssh-key", key()),
                ("userdata-base64", base64()),
            ],
        ),
        (
            "google-gcp",
            vec![
                ("hostname", fqdn()),
                ("region", "projects/1/regions/local".to_owned()),
                ("zone", "projects/1/zones/local-a".to_owned()),
                ("ipv4-public", v4()),
                ("userdata-base", "ssh-keys\nuser-data\n".to_owned()),
                ("userdata-base/user-data", user_data()),
            ],
        ),
        (
            "hetzner-cloud",
            vec![
                ("hostname", fqdn()),
                ("region", region()),
                ("zone", zone()),
                ("ipv4-public", v4()),
                ("ssh-key", key()),
                ("userdata", user_data()),
            ],
        ),
        (
            "oracle-cloud-oci",
            vec![
                ("hostname", short()),
                ("region", region()),
                ("zone", zone()),
                ("ssh-key", key()),
                ("userdata-base64", base64()),
            ],
        ),
        ("scaleway", vec![("userdata", user_data())]),
        (
            "alibaba-ecs",
            vec![
                ("hostname", short()),
                ("region", region()),
                ("zone", zone()),
                ("ssh-key", key()),
                ("userdata", user_data()),
            ],
        ),
        (
            "vultr",
            vec![
                ("hostname", short()),
                ("region", "LOC".to_owned()),
                ("ipv4-public", v4()),
                ("ipv6-public", v6()),
                ("ssh-key", key()),
                ("userdata", user_data()),
            ],
        ),
    ])
}

/// Boots a guest with `record` and an agent; calls `check` with the client's result for each key of each cloud.
fn each_key(record: &Value, mut check: impl FnMut(&str, &str, anyhow::Result<Option<Vec<u8>>>)) {
    let Some(client) = SystemdImds::or_skip() else { return };
    let identity = Identity::of(0);
    let records = tempfile::tempdir().expect("a directory");
    replace(&identity.path(records.path()), &record.to_string()).expect("a record file");
    let host = Host::new().expect("a node");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let port = PortArgument::new(guest.host_tap().name(), identity.mac);
    let _agent = Agent::start(host.ns(), records.path(), &[port]).expect("an agent");
    for cloud in client.clouds().expect("a table") {
        if OTHERS.contains(&cloud.name()) {
            continue;
        }
        for key in cloud.keys() {
            check(cloud.name(), &key, client.ask(&guest, &cloud, &key, None));
            if key == "userdata-base" {
                let below = client.ask(&guest, &cloud, &key, Some("/user-data"));
                check(cloud.name(), "userdata-base/user-data", below);
            }
        }
    }
    eprintln!("systemd {}", client.version());
}

#[test]
fn systemds_client_gets_each_key_it_knows_from_each_cloud() {
    let identity = Identity::of(0);
    let expected = expected(&identity);
    let (mut asked, mut wrong) = (BTreeMap::<String, usize>::new(), Vec::new());
    each_key(&record(&identity), |cloud, key, found| {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let found = found.map(|found| found.map(text)).map_err(|error| format!("{error:#}"));
        let Some(keys) = expected.get(cloud) else {
            wrong.push(format!("{cloud} is new in the table; its {key} is {found:?}"));
            return;
        };
        *asked.entry(cloud.to_owned()).or_default() += 1;
        match keys.iter().find(|(name, _)| *name == key) {
            Some((_, value)) if found.as_ref().ok() == Some(&Some(value.clone())) => {}
            Some((_, value)) => wrong.push(format!("{cloud} {key}: {found:?}, expected {value:?}")),
            None => eprintln!("{cloud} {key}: {found:?}"),
        }
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    if let Some(fewest) = asked.values().min() {
        assert!(*fewest > 0 && asked.len() >= 5, "{asked:?}");
    }
}

#[test]
fn systemd_imports_the_records_credentials_from_each_cloud() {
    let Some(client) = SystemdImds::or_skip() else { return };
    let identity = Identity::of(0);
    let records = tempfile::tempdir().expect("a directory");
    let mut record = record(&identity);
    record.as_object_mut().expect("a mapping").remove("user_data");
    record["systemd_credentials"] = json!([
        { "name": "a.text", "text": "first\nsecond \u{e9}\n" },
        { "name": "a.data", "data": "AP8=" },
        { "name": "a.encrypted", "encrypted": "AAEC" },
    ]);
    replace(&identity.path(records.path()), &record.to_string()).expect("a record file");
    let host = Host::new().expect("a node");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let port = PortArgument::new(guest.host_tap().name(), identity.mac);
    let _agent = Agent::start(host.ns(), records.path(), &[port]).expect("an agent");
    let expected: [(&str, &[u8]); 3] = [
        ("/run/credstore/a.text", "first\nsecond \u{e9}\n".as_bytes()),
        ("/run/credstore/a.data", &[0, 255]),
        ("/run/credstore.encrypted/a.encrypted", &[0, 1, 2]),
    ];
    let (mut wrong, mut clouds) = (Vec::new(), 0);
    for cloud in client.clouds().expect("a table").iter().filter(|cloud| !OTHERS.contains(&cloud.name())) {
        clouds += 1;
        let (found, said) =
            client.import(&guest, cloud).unwrap_or_else(|error| panic!("{}: {error:#}", cloud.name()));
        for (path, content) in expected {
            if found.get(path).map(Vec::as_slice) != Some(content) {
                wrong.push(format!("{} {path}: {:?}; {said}", cloud.name(), found.get(path)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(clouds >= 5, "{clouds} clouds");
}

/// A missing key is a 404, after which the client ends. It would repeat the request after a 429 or 503.
#[test]
fn systemds_client_ends_without_a_key_that_the_record_lacks() {
    let identity = Identity::of(0);
    let mut bare = record(&identity);
    for member in ["ssh_keys", "user_data"] {
        bare.as_object_mut().expect("a mapping").remove(member);
    }
    // The address of a DHCP lease is unknown to the agent.
    bare["network"]["nics"][0]["addresses"] = json!([{ "method": "dhcp4" }]);
    let mut wrong = Vec::new();
    each_key(&bare, |cloud, key, found| match (key, found) {
        (_, Err(error)) => wrong.push(format!("{cloud} {key}: {error:#}")),
        ("hostname" | "region" | "zone", Ok(None)) => wrong.push(format!("{cloud} {key}: not found")),
        ("ssh-key" | "userdata" | "ipv4-public" | "ipv6-public", Ok(Some(text))) if !text.is_empty() => {
            wrong.push(format!("{cloud} {key}: {}", String::from_utf8_lossy(&text)));
        }
        _ => {}
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
