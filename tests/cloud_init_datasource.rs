//! cloud-init's own NoCloud datasource, unmodified, takes what the record says and never sleeps for it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use support::agent::{Agent, PortArgument};
use support::cloudinit::{CloudInit, Crawl};
use support::guest::{Guest, Spec};
use support::host::Host;
use support::record::{Identity, replace};

const SEED: &str = "http://169.254.169.254/v1/";
/// `#cloud-config\nruncmd:\n- [touch, /run/packed]\n`, packed by gzip.
const GZIP: &str = "H4sIAAAAAAACA1NOzskvTdFNzs9Ly0znKirNS85NseLSVYguyS9NztBR0AcK6RckJmenpsRyAQAuDJvZLQAAAA==";

/// Crawls as guest 0, whose record `change` has been at.
fn crawl(cloud_init: &CloudInit, change: impl FnOnce(&mut Value)) -> Crawl {
    let identity = Identity::of(0);
    let mut record: Value = serde_json::from_str(&identity.record(1)).expect("a record");
    change(&mut record);
    let records = tempfile::tempdir().expect("a directory");
    replace(&identity.path(records.path()), &record.to_string()).expect("a record file");

    let host = Host::new().expect("a node");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let port = PortArgument::new(guest.host_tap().name(), identity.mac);
    let _agent = Agent::start(host.ns(), records.path(), &[port]).expect("an agent");
    let crawl = cloud_init.crawl(guest.ns(), SEED).expect("a crawl");
    assert!(crawl.found, "cloud-init {} does not take the seed: {crawl:?}", crawl.version);
    crawl
}

/// What must hold whatever the record.
fn assert_taken_at_once(crawl: &Crawl) {
    let identity = Identity::of(0);
    assert_eq!(crawl.datasource, "DataSourceNoCloudNet");
    assert_eq!(crawl.instance_id, identity.instance_id);
    assert_eq!(crawl.hostname, identity.hostname);
    assert!(crawl.sleeps.is_empty(), "slept {} s over {:?}", crawl.slept(), crawl.requests);
    let mut requests = crawl.requests.clone();
    requests.sort();
    requests.dedup();
    assert_eq!(requests.len(), crawl.requests.len(), "asked twice: {:?}", crawl.requests);
    for file in ["meta-data", "user-data", "vendor-data"] {
        assert!(requests.contains(&format!("GET /v1/{file}")), "{:?}", crawl.requests);
    }
}

#[test]
fn a_full_record_arrives_whole() {
    let Some(cloud_init) = CloudInit::or_skip() else { return };
    let vendor_data = "#cloud-config\n{}\n";
    let crawl = crawl(cloud_init, |record| record["vendor_data"] = json!({"text": vendor_data}));
    assert_taken_at_once(&crawl);
    let identity = Identity::of(0);
    assert_eq!(crawl.ssh_keys, [identity.ssh_key]);
    assert_eq!(crawl.metadata["local-hostname"], format!("{}.lab.internal", identity.hostname));
    assert_eq!(String::from_utf8_lossy(&crawl.user_data), identity.user_data);
    assert_eq!(String::from_utf8_lossy(&crawl.vendor_data), vendor_data);
}

#[test]
fn a_bare_record_costs_no_retry() {
    let Some(cloud_init) = CloudInit::or_skip() else { return };
    let crawl = crawl(cloud_init, |record| {
        let fields = record.as_object_mut().expect("a mapping");
        for field in ["user_data", "vendor_data", "ssh_keys"] {
            fields.remove(field);
        }
    });
    assert_taken_at_once(&crawl);
    assert_eq!(crawl.ssh_keys, [""; 0]);
    assert_eq!(crawl.user_data, b"");
    assert_eq!(crawl.vendor_data, b"");
}

#[test]
fn packed_user_data_arrives_packed() {
    let Some(cloud_init) = CloudInit::or_skip() else { return };
    let crawl = crawl(cloud_init, |record| record["user_data"] = json!({"base64": GZIP}));
    assert_taken_at_once(&crawl);
    assert_eq!(crawl.user_data, STANDARD.decode(GZIP).expect("base64"));
}
