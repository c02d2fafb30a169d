//! Properties of EC2's tree that the vectors do not cover.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{TOKEN, TTL, letters};
use crate::dialect::render;
use crate::dialect::tests::{DialectGuest, bare, full, issued, nic, parse, sign, text};
use crate::http::{Method, Response};
use crate::identity::SigningJob;
use crate::store::{Interner, LiveOutcome, Responses, VmState};

const TREE: &str = "/latest/meta-data";
const ROLE: &str = "/latest/meta-data/iam/security-credentials/app";
/// Names whose value may have several lines.
const LISTS: [&str; 6] = [
    "local-ipv4s",
    "public-ipv4s",
    "ipv6s",
    "subnet-ipv6-cidr-blocks",
    "vpc-ipv4-cidr-blocks",
    "vpc-ipv6-cidr-blocks",
];

fn token(guest: &DialectGuest) -> String {
    text(&guest.ask(Method::Put, "/latest/api/token", &[(TTL, "60")]))
}

/// Crawls a directory as cloud-init does (`MetadataMaterializer`) and returns each leaf.
fn crawl(guest: &DialectGuest, directory: &str, seen: &mut Vec<(String, Response)>) {
    let listing = guest.ask(Method::Get, directory, &[]);
    assert_eq!(listing.status().0, 200, "{directory}");
    let listing = text(&listing);
    assert!(!listing.is_empty() && !listing.ends_with('\n'), "{directory}: {listing:?}");
    for line in listing.lines().filter(|line| *line != "security-credentials/") {
        if let Some(name) = line.strip_suffix('/') {
            crawl(guest, &format!("{directory}/{name}"), seen);
            continue;
        }
        let name = match line.split_once('=') {
            Some((number, _)) if number.parse::<u32>().is_ok() => format!("{number}/openssh-key"),
            _ => line.to_owned(),
        };
        let path = format!("{directory}/{name}");
        let leaf = guest.ask(Method::Get, &path, &[]);
        assert_eq!(leaf.status().0, 200, "{path} is listed as {line}");
        seen.push((path, leaf));
    }
}

fn leaves(guest: &DialectGuest) -> Vec<String> {
    let mut seen = Vec::new();
    crawl(guest, TREE, &mut seen);
    crawl(guest, "/latest/dynamic", &mut seen);
    seen.into_iter().map(|(path, _)| path).collect()
}

fn served(dialects: &[&str], imdsv2: &str) -> DialectGuest {
    let mut record = full();
    record["serve"] = json!({ "dialects": dialects, "imdsv2": imdsv2 });
    DialectGuest::of(&record)
}

#[test]
fn a_vm_without_nics_keys_or_tags_lists_none() {
    let guest = DialectGuest::of(&bare());
    let names = "ami-id\nami-launch-index\nami-manifest-path\nblock-device-mapping/\nhostname\ninstance-action\n\
                 instance-id\ninstance-life-cycle\ninstance-type\nlocal-hostname\nplacement/\nreservation-id\n\
                 security-groups\nservices/";
    assert_eq!(guest.text(TREE), names);
    assert_eq!(guest.text("/latest"), "dynamic\nmeta-data");
    assert_eq!(guest.status("/latest/user-data", &[]), 404);
    let document: Value =
        serde_json::from_str(&guest.text("/latest/dynamic/instance-identity/document")).expect("JSON");
    assert!(document.get("privateIp").is_none());
    assert_eq!(leaves(&guest).len(), 18);
}

#[test]
fn a_vm_with_ipv6_only_has_no_ipv4_names() {
    let mut record = full();
    let addresses = json!([
        { "method": "static", "address": "2001:db8::15/64", "public": "2001:db8:1::15" },
        { "method": "static", "address": "2001:db8::16/64" },
        { "method": "static", "address": "2001:db8:0:1::15/64" },
        { "method": "dhcp4" },
    ]);
    record["network"]["nics"] = json!([nic(1, &addresses)]);
    let guest = DialectGuest::of(&record);
    let ipv4: Vec<_> = leaves(&guest).into_iter().filter(|path| path.contains("ipv4")).collect();
    assert_eq!(ipv4, [""; 0]);
    assert!(leaves(&guest).iter().all(|path| !path.ends_with("public-hostname")));
    assert_eq!(guest.text(&format!("{TREE}/ipv6")), "2001:db8::15");
    let mac = format!("{TREE}/network/interfaces/macs/52:54:00:00:00:01");
    assert_eq!(guest.text(&format!("{mac}/ipv6s")), "2001:db8::15\n2001:db8::16\n2001:db8:0:1::15");
    assert_eq!(guest.text(&format!("{mac}/subnet-ipv6-cidr-blocks")), "2001:db8::/64\n2001:db8:0:1::/64");
}

/// EC2 documents MACs as its listing spells them, in lower case, and no other spelling.
#[test]
fn a_nic_is_found_by_its_mac_as_the_listing_spells_it() {
    let mut record = full();
    let mut own = nic(1, &json!([{ "method": "dhcp4", "address": "10.0.0.5/24" }]));
    own["mac"] = "52:54:00:AB:CD:EF".into();
    record["network"]["nics"] = json!([own]);
    let guest = DialectGuest::of(&record);
    let macs = format!("{TREE}/network/interfaces/macs");
    assert_eq!(guest.text(&macs), "52:54:00:ab:cd:ef/");
    assert_eq!(guest.text(&format!("{macs}/52:54:00:ab:cd:ef/device-number")), "0");
    let upper = guest.ask(Method::Get, &format!("{macs}/52:54:00:AB:CD:EF/device-number"), &[]);
    assert_eq!(upper.status().0, 404);
}

#[test]
fn interfaces_that_the_guest_creates_are_not_listed() {
    let mut record = full();
    record["network"]["nics"] = json!([
        { "id": "b", "mac": "52:54:00:00:00:01", "bond": { "links": ["n1", "n2"], "mode": "active-backup" },
          "addresses": [{ "method": "dhcp4", "address": "10.0.0.5/24" }] },
        nic(1, &json!([])),
        nic(2, &json!([])),
        { "id": "v", "mac": "52:54:00:00:00:09", "vlan": { "link": "b", "id": 7 } },
    ]);
    let guest = DialectGuest::of(&record);
    let macs = format!("{TREE}/network/interfaces/macs");
    assert_eq!(guest.text(&macs), "52:54:00:00:00:01/\n52:54:00:00:00:02/");
    assert_eq!(guest.text(&format!("{macs}/52:54:00:00:00:02/device-number")), "1");
    assert_eq!(guest.text(&format!("{TREE}/local-ipv4")), "10.0.0.5", "the first NIC counts even as a bond");
}

#[test]
fn key_names_cannot_change_which_paths_a_crawler_requests() {
    let mut record = full();
    let names = ["a/", "b/c", "x\u{2028}y", "7"];
    record["ssh_keys"] =
        names.iter().map(|name| json!({ "name": name, "key": format!("k {name}") })).collect();
    let guest = DialectGuest::of(&record);
    assert_eq!(guest.text(&format!("{TREE}/public-keys")), "0=a_\n1=b_c\n2=x_y\n3=7");
    assert_eq!(guest.text(&format!("{TREE}/public-keys/3/openssh-key")), "k 7");
    assert_eq!(leaves(&guest).iter().filter(|path| path.contains("/public-keys/")).count(), 4);
}

#[test]
fn metadata_that_cannot_be_a_tag_is_left_out() {
    let mut record = full();
    let long = "k".repeat(129);
    record["metadata"] = json!({
        ".": "a", "..": "a", "_index": "a", long: "a", "lines": "a\nb", "empty": "", "json": "{\"a\":1}",
    });
    let guest = DialectGuest::of(&record);
    assert_eq!(guest.text(&format!("{TREE}/tags/instance")), "empty\njson");
    assert_eq!(guest.text(&format!("{TREE}/tags/instance/empty")), "");
    record["metadata"] = json!({ ".": "a" });
    assert_eq!(DialectGuest::of(&record).status(&format!("{TREE}/tags"), &[]), 404);
}

#[test]
fn the_bus_of_a_disk_determines_its_name() {
    let mut record = full();
    let disk = |kind: &str, bus: &str| json!({ "type": kind, "bus": bus, "address": "0" });
    record["disks"] = json!([
        disk("cdrom", "sata"),
        disk("disk", "scsi"),
        disk("disk", "virtio"),
        disk("disk", "scsi"),
        disk("disk", "nvme"),
    ]);
    let guest = DialectGuest::of(&record);
    let mapping = format!("{TREE}/block-device-mapping");
    assert_eq!(guest.text(&mapping), "ami\nebs1\nebs2\nebs3\nroot");
    let names = ["ami", "root", "ebs1", "ebs2", "ebs3"].map(|name| guest.text(&format!("{mapping}/{name}")));
    assert_eq!(names, ["/dev/sda", "/dev/sda", "/dev/vda", "/dev/sdb", "/dev/nvme0n1"]);
}

#[test]
fn every_version_is_the_same_tree() {
    let guest = DialectGuest::of(&full());
    for version in ["/latest", "/1.0", "/2009-04-04", "/ec2/2016-09-02", "/ec2/latest"] {
        assert_eq!(guest.text(version), "dynamic\nmeta-data\nuser-data", "{version}");
        assert_eq!(guest.text(&format!("{version}/meta-data/instance-id")), "i-0f5e8a1b2c3d4e5f6");
    }
}

#[test]
fn tokens_are_issued_at_one_path_for_the_requested_seconds() {
    let guest = DialectGuest::of(&full());
    let cases = [
        ("/latest/api/token", "1", 200),
        ("/latest/api/token", "21600", 200),
        ("/latest/api/token", "0060", 200),
        ("/latest/api/token", "21601", 400),
        ("/latest/api/token", "0", 400),
        ("/latest/api/token", "-1", 400),
        ("/latest/api/token", "+60", 400),
        ("/latest/api/token", "", 400),
        ("/latest/api/token", "6e1", 400),
        ("/latest/api/token", "99999999999999999999", 400),
        ("/1.0/api/token", "60", 403),
        ("/ec2/latest/api/token", "60", 403),
    ];
    for (path, ttl, status) in cases {
        let response = guest.ask(Method::Put, path, &[(TTL, ttl)]);
        assert_eq!(response.status().0, status, "{path} with {ttl:?}");
        if status == 200 {
            assert_eq!(response.field(TTL), Some(ttl.trim_start_matches('0')));
        }
    }
    let options = guest.ask(Method::Options, "/latest/api/token", &[]);
    assert_eq!((options.status().0, options.field("Allow")), (204, Some("OPTIONS, PUT")));
}

#[test]
fn the_hop_limit_applies_only_to_packets_with_a_token() {
    let mut record = full();
    record["serve"]["hop_limit"] = json!(2);
    let guest = DialectGuest::of(&record);
    let put = |ttl| guest.ask(Method::Put, "/latest/api/token", &[(TTL, ttl)]).hop_limit();
    assert_eq!((put("60"), put("0")), (Some(2), None));
    assert_eq!(guest.ask(Method::Get, TREE, &[]).hop_limit(), None);
}

#[test]
fn a_token_expires_and_is_invalid_for_another_vm() {
    let mut guest = DialectGuest::of(&full());
    let token = token(&guest);
    let field = [(TOKEN, token.as_str())];
    assert_eq!(guest.status(TREE, &field), 200);
    assert_eq!(DialectGuest::of(&full()).status(TREE, &field), 401, "another key");
    guest.now += 59;
    assert_eq!(guest.status(TREE, &field), 200);
    guest.now += 1;
    assert_eq!(guest.status(TREE, &field), 401);
}

#[test]
fn the_record_decides_whether_the_tree_needs_tokens() {
    let paths = ["/latest", TREE, "/latest/user-data", "/latest/dynamic", "/latest/nothing/here"];
    for (mode, without, with_bad) in [("off", 200, 401), ("optional", 200, 401), ("required", 401, 401)] {
        let guest = served(&["ec2"], mode);
        for path in paths {
            let found = if path.contains("nothing") { 404 } else { 200 };
            let without = if without == 200 { found } else { without };
            assert_eq!(guest.status(path, &[]), without, "{path} under {mode}");
            assert_eq!(guest.status(path, &[(TOKEN, "bogus")]), with_bad, "{path} under {mode}");
            if mode != "off" {
                assert_eq!(guest.status(path, &[(TOKEN, &token(&guest))]), found, "{path} under {mode}");
            }
        }
        let put = guest.ask(Method::Put, "/latest/api/token", &[(TTL, "60")]).status().0;
        assert_eq!(put, if mode == "off" { 404 } else { 200 }, "{mode}");
        assert_eq!(guest.status("/", &[]), 200, "the root is not part of the tree");
    }
}

#[test]
fn credentials_need_a_token_unless_the_record_opens_them() {
    for (mode, opened, without, with) in [
        ("off", false, 401, None),
        ("off", true, 200, None),
        ("optional", false, 401, Some(200)),
        ("optional", true, 200, Some(200)),
        ("required", false, 401, Some(200)),
        ("required", true, 401, Some(200)),
    ] {
        let mut record = full();
        record["serve"] = json!({ "imdsv2": mode, "imdsv1_credentials": opened });
        let guest = DialectGuest::of(&record);
        for path in [ROLE, "/latest/meta-data/iam/security-credentials"] {
            let case = format!("{path} under {mode}, opened {opened}");
            assert_eq!(guest.status(path, &[]), without, "{case}");
            assert_eq!(guest.status(path, &[("X-Forwarded-For", "")]), 403, "{case}");
            let Some(with) = with else { continue };
            let token = token(&guest);
            assert_eq!(guest.status(path, &[(TOKEN, &token)]), with, "{case}");
            assert_eq!(guest.status(path, &[(TOKEN, &token), ("x-forwarded-for", "::1")]), 403, "{case}");
        }
        if mode != "required" {
            let listed = guest.text(&format!("{TREE}/iam")).contains("security-credentials/");
            assert_eq!(listed, without == 200 || with.is_some(), "{mode}, opened {opened}");
        }
    }
}

#[test]
fn keys_without_an_expiry_get_one_in_six_hours() {
    let mut record = full();
    record["credentials"]["iam"] = json!({ "role": "app", "access_key_id": "A", "secret_access_key": "s" });
    record["serve"]["imdsv1_credentials"] = json!(true);
    let guest = DialectGuest::of(&record);
    let document: Value = serde_json::from_str(&guest.text(ROLE)).expect("JSON");
    assert_eq!(document["Expiration"], "2026-11-21T06:00:00Z");
    assert_eq!((&document["AccessKeyId"], &document["Token"]), (&json!("A"), &json!("")));
    assert!(!format!("{:?}", guest.responses()).contains(r#""s""#), "a secret is in the debug output");
}

#[test]
fn guests_of_openstack_crawl_a_tree_without_tokens_and_credentials() {
    for dialects in [["openstack"], ["eve"]] {
        for mode in ["off", "optional", "required"] {
            let guest = served(&dialects, mode);
            let leaves = leaves(&guest);
            assert!(leaves.iter().any(|path| path.ends_with("/local-ipv4")));
            assert!(leaves.iter().all(|path| !path.contains("/iam")), "{leaves:?}");
            assert_eq!(guest.status(ROLE, &[]), 404);
            assert_eq!(guest.ask(Method::Put, "/latest/api/token", &[(TTL, "60")]).status().0, 404);
        }
    }
    assert_eq!(served(&["nocloud"], "optional").status(TREE, &[]), 404);
}

#[test]
fn guests_of_openstack_get_no_404_beside_cloudstacks_tree() {
    let mut record = full();
    for (dialects, names) in [(json!(["openstack"]), 0), (json!(["openstack", "cloudstack"]), 10)] {
        record["serve"] = json!({ "dialects": dialects, "date_tree": "cloudstack" });
        assert_eq!(DialectGuest::of(&record).text(TREE).lines().count(), names, "{dialects}");
    }
    record["serve"] = json!({ "dialects": ["ec2"], "date_tree": "cloudstack" });
    assert_eq!(DialectGuest::of(&record).status(TREE, &[]), 404);
}

prop_compose! {
    /// A record with random parts of everything the tree contains.
    fn records()(
        nics in prop::collection::vec(prop::collection::vec(0_usize..6, 0..4), 0..5),
        keys in prop::collection::vec("[^\\p{Cc}=]{1,12}", 0..4),
        metadata in prop::collection::btree_map("[A-Za-z0-9._-]{1,6}", any::<String>(), 0..8),
        (zone, kind, name) in ("[^\\p{Cc}]{1,12}", "[^\\p{Cc}]{1,12}", "[^\\p{Cc}]{1,12}"),
        role in prop::option::of("[A-Za-z0-9+=,@_-]{1,12}"),
        disks in 0_usize..4,
    ) -> Value {
        const ADDRESSES: [&str; 6] = [
            r#"{"method": "dhcp4"}"#,
            r#"{"method": "dhcp4", "address": "10.1.2.3/20", "public": "203.0.113.9"}"#,
            r#"{"method": "static", "address": "192.0.2.7/32", "gateway": "192.0.2.1"}"#,
            r#"{"method": "slaac", "address": "2001:db8::7/64", "public": "2001:db8::8"}"#,
            r#"{"method": "static", "address": "fd00::1/128"}"#,
            r#"{"method": "dhcp6"}"#,
        ];
        let mut record = full();
        let address = |n: &usize| -> Value { serde_json::from_str(ADDRESSES[*n]).expect("JSON") };
        record["network"]["nics"] = nics
            .iter()
            .enumerate()
            .map(|(n, addresses)| nic(n, &addresses.iter().map(address).collect()))
            .collect();
        record["ssh_keys"] = keys.iter().map(|name| json!({ "name": name, "key": "k" })).collect();
        record["metadata"] = json!(metadata);
        record["placement"]["zone"] = json!(zone);
        record["instance_type"] = json!(kind);
        record["vm"]["name"] = json!(name);
        let iam = |role| json!({ "role": role, "access_key_id": "A", "secret_access_key": "s" });
        record["credentials"] = json!({ "iam": role.map(iam) });
        record["disks"] = vec![json!({ "type": "disk", "bus": "virtio", "address": "0" }); disks].into();
        record
    }
}

proptest! {
    #[test]
    fn every_listed_name_is_served(record in records()) {
        let guest = DialectGuest::of(&record);
        let mut seen = Vec::new();
        crawl(&guest, TREE, &mut seen);
        crawl(&guest, "/latest/dynamic", &mut seen);
        for (path, leaf) in seen {
            let name = path.rsplit('/').next().expect("a name");
            let text = text(&leaf);
            prop_assert!(!text.ends_with('\n'), "{} ends in a newline", path);
            let is_list = LISTS.contains(&name) || path.contains("/ipv4-associations/");
            prop_assert!(is_list || !text.contains('\n'), "{} has several lines", path);
            prop_assert_eq!(leaf.field("Content-Type"), Some("text/plain; charset=utf-8"));
        }
    }
}

#[test]
fn keys_with_an_unread_source_are_503() {
    let mut record = full();
    record["credentials"]["iam"] = json!({ "role": "app", "source": { "file": "keys" } });
    let guest = DialectGuest::of(&record);
    let token = token(&guest);
    let fields = [(TOKEN, token.as_str())];
    let response = guest.ask(Method::Get, ROLE, &fields);
    assert_eq!((response.status().0, response.field("Retry-After")), (503, Some("1")));
    assert_eq!(guest.status(ROLE, &[]), 401);
    assert_eq!(text(&guest.ask(Method::Get, "/latest/meta-data/iam/security-credentials", &fields)), "app");
}

#[test]
fn content_that_vms_share_is_stored_once() {
    let mut interner = Interner::new();
    let mut guests: Vec<Responses> = Vec::new();
    let mut held = Vec::new();
    for n in 0..50 {
        let mut record = full();
        record["vm"]["uuid"] = json!(format!("7c0f1a52-3b5e-4d1a-9d2c-{n:012}"));
        record["vm"]["ec2_id"] = Value::Null;
        record["hostname"]["short"] = json!(format!("web-{n}"));
        record["serve"] = json!({ "dialects": ["ec2"] });
        let record = parse(&record);
        guests.push(render(&record, &mut interner, VmState::alone(record.vm.uuid.as_str())));
        held.push(interner.len());
    }
    let routes = guests[0].routes().count();
    let own = held[49] - held[48];
    assert!(own <= 6, "{own} of {routes} responses are unique to a VM, although all VMs have equal NICs");
}

#[test]
fn disks_beyond_the_alphabet_have_two_letters() {
    let named = [(1, "a"), (26, "z"), (27, "aa"), (52, "az"), (53, "ba"), (702, "zz"), (703, "aaa")];
    for (number, name) in named {
        assert_eq!(letters(number), name, "{number}");
    }
}

const DIRECTORY: &str = "/latest/dynamic/instance-identity";
const NAMES: [&str; 3] = ["pkcs7", "rsa2048", "signature"];

fn serving(serve: Value, identity: Value) -> Value {
    let mut record = full();
    (record["serve"], record["identity"]) = (serve, identity);
    record
}

#[test]
fn the_signed_bytes_are_those_of_the_document() {
    for name in NAMES {
        let (guest, orders) = issued(&full(), true);
        let document = guest.text(&format!("{DIRECTORY}/document"));
        let (work, answer) = guest.served(&format!("{DIRECTORY}/{name}"), &[], &orders);
        match (name, work) {
            ("signature", SigningJob::Signature(signed))
            | ("pkcs7" | "rsa2048", SigningJob::Envelope(signed)) => {
                assert_eq!(signed, document, "{name}");
            }
            (_, other) => panic!("{name}: {other:?}"),
        }
        assert_eq!((answer.status().0, answer.hop_limit(), &*text(&answer)), (200, Some(1), "SIGNED"));
        assert_eq!(answer.field("Content-Type"), Some("text/plain; charset=utf-8"));
    }
}

#[test]
fn a_crawler_needs_two_signatures() {
    let (guest, orders) = issued(&full(), true);
    assert_eq!(guest.text(DIRECTORY), "document\npkcs7\nrsa2048\nsignature");
    let mut parked = Vec::new();
    for name in NAMES {
        let target = format!("{DIRECTORY}/{name}");
        let LiveOutcome::Park(wait) = guest.get(&target, &[], None) else { panic!("{name} is not parked") };
        parked.push((target, wait));
    }
    let orders: Vec<_> = orders.lock().expect("sound").drain(..).collect();
    assert_eq!(orders.len(), 2, "`pkcs7` and `rsa2048` are one");
    orders.into_iter().for_each(|order| sign(order, "SIGNED"));
    for (target, wait) in parked {
        assert!(matches!(guest.get(&target, &[], Some(&wait)), LiveOutcome::Ready(_)), "{target}");
    }
}

#[test]
fn names_are_listed_only_where_they_are_served() {
    let all = json!({"dialects": ["ec2", "openstack"]});
    let cases = [
        (true, true, all.clone(), json!({}), true),
        (true, true, all.clone(), json!({"audiences": ["vault"]}), true),
        (true, true, all.clone(), json!({"audiences": []}), false),
        (true, true, json!({"dialects": ["openstack"]}), json!({}), false),
        (true, false, all.clone(), json!({}), false),
        (false, false, all, json!({}), false),
    ];
    for (issuer, certificate, serve, identity, serves) in cases {
        let record = serving(serve.clone(), identity.clone());
        let guest = if issuer { issued(&record, certificate).0 } else { DialectGuest::of(&record) };
        let listing = if serves { "document\npkcs7\nrsa2048\nsignature" } else { "document" };
        assert_eq!(guest.text(DIRECTORY), listing, "{issuer} {certificate} {serve} {identity}");
        for name in NAMES.iter().filter(|_| !serves) {
            assert_eq!(guest.status(&format!("{DIRECTORY}/{name}"), &[]), 404, "{name} {serve} {identity}");
        }
    }
}

#[test]
fn the_guards_are_those_of_the_tree_and_no_proxy() {
    for (imdsv2, without, wrong, with) in [
        ("off", None, Some(401), Some(401)),
        ("optional", None, Some(401), None),
        ("required", Some(401), Some(401), None),
    ] {
        let (guest, orders) = issued(&serving(json!({"imdsv2": imdsv2}), json!({})), true);
        let token = text(&guest.ask(Method::Put, "/latest/api/token", &[(TTL, "60")]));
        for name in NAMES {
            let target = format!("{DIRECTORY}/{name}");
            let status = |fields: &[(&str, &str)]| match guest.get(&target, fields, None) {
                LiveOutcome::Ready(answer) => Some(answer.status().0),
                _ => None,
            };
            assert_eq!(status(&[]), without, "{imdsv2} {name}");
            assert_eq!(status(&[(TOKEN, "wrong")]), wrong, "{imdsv2} {name}");
            if with.is_none() {
                assert_eq!(status(&[(TOKEN, &token)]), None, "{imdsv2} {name}");
                let proxied = [(TOKEN, &*token), ("X-Forwarded-For", "10.0.0.1")];
                assert_eq!(status(&proxied), Some(403), "{imdsv2} {name}");
            }
        }
        orders.lock().expect("sound").clear();
    }
}

#[test]
fn a_lost_order_is_to_be_asked_for_again() {
    let (guest, orders) = issued(&full(), true);
    let target = format!("{DIRECTORY}/signature");
    let LiveOutcome::Park(parked) = guest.get(&target, &[], None) else { panic!("not parked") };
    orders.lock().expect("sound").clear();
    let LiveOutcome::Ready(answer) = guest.get(&target, &[], Some(&parked)) else { panic!("not ready") };
    assert_eq!((answer.status().0, answer.field("Retry-After")), (503, Some("1")));
}
