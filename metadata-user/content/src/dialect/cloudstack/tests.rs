//! Properties of CloudStack and Exoscale that the vectors do not cover.

use serde_json::{Value, json};

use super::REQUEST;
use crate::dialect::tests::{DialectGuest, bare, full, nic, text};
use crate::http::Method;

const TREE: &str = "/latest/meta-data";

fn ask(guest: &DialectGuest, path: &str, fields: &[(&str, &str)]) -> (u16, String) {
    let response = guest.ask_at(("10.0.2.2", 8080), Method::Get, path, fields);
    (response.status().0, text(&response))
}

fn with_password(password: &str) -> Value {
    let mut record = full();
    record["admin"] = json!({ "password": password });
    record
}

fn flat(mut record: Value) -> DialectGuest {
    record["serve"] = json!({ "date_tree": "cloudstack" });
    DialectGuest::of(&record)
}

#[test]
fn every_listed_name_of_the_flat_tree_is_served() {
    let mut ipv6 = full();
    ipv6["network"]["nics"] = json!([nic(1, &json!([{ "method": "static", "address": "2001:db8::5/64" }]))]);
    for (record, names) in [(full(), 10), (bare(), 6), (ipv6, 7)] {
        let guest = flat(record);
        let listing = guest.text(TREE);
        assert_eq!(listing.lines().count(), names, "{listing}");
        assert!(listing.lines().is_sorted(), "{listing}");
        for name in listing.lines() {
            let leaf = guest.text(&format!("{TREE}/{name}"));
            assert!(!leaf.ends_with('\n'), "{name}");
            assert_eq!(guest.text(&format!("/latest/{name}")), leaf, "{name}");
        }
    }
    assert_eq!(flat(bare()).status("/latest/user-data", &[]), 404);
    assert_eq!(flat(bare()).text("/latest"), "meta-data");
}

#[test]
fn all_keys_are_in_one_leaf() {
    let mut record = full();
    record["ssh_keys"] = json!([{ "name": "a", "key": "k a" }, { "name": "b", "key": "k b" }]);
    assert_eq!(flat(record).text(&format!("{TREE}/public-keys")), "k a\nk b");
}

#[test]
fn date_tree_decides_whether_the_flat_tree_is_served() {
    let mut record = full();
    record["serve"] = json!({ "dialects": ["cloudstack"], "date_tree": "ec2" });
    assert_eq!(DialectGuest::of(&record).status(TREE, &[]), 404);
    record["serve"] = json!({ "dialects": ["exoscale"], "date_tree": "cloudstack" });
    assert_eq!(DialectGuest::of(&record).text(&format!("{TREE}/vm-id")), record["vm"]["uuid"]);
}

#[test]
fn a_password_is_served_until_it_is_saved() {
    let (send, saved) = ([(REQUEST, "send_my_password")], [(REQUEST, "saved_password")]);
    let guest = DialectGuest::of(&with_password("first"));
    let answer = |text: &str| (200, text.to_owned());
    assert_eq!(ask(&guest, "/", &send), answer("first"));
    assert_eq!(ask(&guest, "/any/path", &send), answer("first"), "at any path, any number of times");
    assert_eq!(ask(&guest, "/", &[(REQUEST, "Send_My_Password")]), answer("bad_request"));
    assert_eq!(ask(&guest, "/1.0", &saved), answer("saved_password"));
    assert_eq!(ask(&guest, "/", &send), answer("saved_password"));
    assert_eq!(ask(&guest.changed(&with_password("first")), "/", &send), answer("saved_password"));
    let bare = DialectGuest::of(&bare());
    assert_eq!(ask(&bare, "/", &send), answer(""), "the record has no password");
    assert_eq!(ask(&bare, "/", &saved), answer("saved_password"));
    assert_eq!(ask(&bare, "/", &send), answer(""));
}

#[test]
fn a_password_does_not_reach_proxies_logs_or_port_80() {
    let guest = DialectGuest::of(&with_password("s3cret"));
    let fields = [(REQUEST, "send_my_password"), ("X-Forwarded-For", "")];
    assert_eq!(ask(&guest, "/", &fields).0, 403);
    assert!(!format!("{:?}", guest.responses()).contains("s3cret"));
    let root = guest.ask(Method::Get, "/", &fields[..1]);
    assert!(text(&root).starts_with("1.0\n"));
}
