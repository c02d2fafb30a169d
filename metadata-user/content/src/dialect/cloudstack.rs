//! CloudStack and Exoscale: a flat tree at the dated paths, and the password server on port 8080.
//!
//! `public-keys` is a leaf here and a directory on EC2, so `serve.date_tree` decides which tree the dated paths
//! serve. The password server has its own port and always exists.

use super::common::public_key_lines;
use super::route_builder::{RouteBuilder, TEXT, computed};
use super::{Description, Mount, tokens};
use crate::http::{Response, StatusCode};
use crate::record::values::Secret;
use crate::record::{DateTree, Record};
use crate::store::{Host, LiveRequest, Methods};

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/latest"), Mount::open("/").at(Host::Password)],
    "`DataSourceCloudStack`, `DataSourceExoscale`",
    render,
)
.remark(
    "`/latest`, and any date for it, only with `serve.date_tree: cloudstack`; passwords on port 8080 with either tree",
);

/// Header field with the request to the password server.
const REQUEST: &str = "DomU_Request";
/// Request with which the guest confirms that it saved the password, and response once it has.
const SAVED: &str = "saved_password";

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    if record.serve.date_tree == DateTree::CloudStack {
        tree(record, routes);
        tokens::absent(routes);
    }
    routes.at(Host::Password);
    let password = record.admin.as_ref().and_then(|admin| admin.password.clone());
    // The password also requires the field `REQUEST`.
    let server = computed("the password, until the guest has saved it", move |call| {
        answer_password(call, password.as_ref())
    });
    routes.live_below("/", Methods::READ, &*tokens::UNPROXIED, server);
}

/// Adds the flat tree. cloud-init fails without `availability-zone` and `instance-id`.
fn tree(record: &Record, routes: &mut RouteBuilder<'_>) {
    let mut leaves = vec![
        ("/latest/meta-data/availability-zone", record.placement.zone.to_string()),
        ("/latest/meta-data/cloud-identifier", format!("CloudStack-{}", record.placement.region)),
        ("/latest/meta-data/instance-id", record.vm.uuid.to_string()),
        ("/latest/meta-data/local-hostname", record.hostname.short.to_string()),
    ];
    let first = record.network.nics.first();
    let local = first.and_then(|nic| nic.ipv4().next()).map(|cidr| cidr.address.to_string());
    let public = first.and_then(|nic| nic.public_ipv4().next()).map(|address| address.to_string());
    let mut absent = Vec::new();
    let mut known = |path, text: Option<String>| match text {
        Some(text) => leaves.push((path, text)),
        // Served but not listed: Afterburn requests each by name, retries a 404 for 40 s and then gives up.
        None => absent.push((path, String::new())),
    };
    known("/latest/meta-data/local-ipv4", local);
    known("/latest/meta-data/public-hostname", public.as_ref().map(|_| record.hostname.short.to_string()));
    known("/latest/meta-data/public-ipv4", public);
    known("/latest/meta-data/public-keys", Some(public_key_lines(record)).filter(|keys| !keys.is_empty()));
    leaves.push(("/latest/meta-data/service-offering", record.instance_type().to_owned()));
    leaves.push(("/latest/meta-data/vm-id", record.vm.uuid.to_string()));

    let names: Vec<&str> = leaves.iter().filter_map(|(path, _)| path.rsplit('/').next()).collect();
    routes.text("/latest/meta-data", names.join("\n"));
    for (path, text) in leaves.into_iter().chain(absent) {
        let response = routes.found(TEXT, text);
        // CloudStack's documentation names the leaf without `meta-data`. Its virtual router serves both.
        routes.open(path.replacen("/meta-data", "", 1), response.clone());
        routes.open(path, response);
    }
    routes.text("/latest", if record.user_data.is_some() { "meta-data\nuser-data" } else { "meta-data" });
    if let Some(user_data) = &record.user_data {
        let response = routes.payload(user_data);
        routes.open("/latest/user-data", response);
    }
}

/// Returns the record's password on any path, until the guest reports that it has saved it.
fn answer_password(call: &LiveRequest<'_>, password: Option<&Secret>) -> Response {
    let text = match (call.request.headers.get(REQUEST), password) {
        (Some(b"send_my_password"), None) => "",
        (Some(b"send_my_password"), Some(_)) if call.vm.mailbox.password_taken() => SAVED,
        (Some(b"send_my_password"), Some(password)) => {
            call.vm.mailbox.give_password(password.expose());
            password.expose()
        }
        (Some(b"saved_password"), None) => SAVED,
        (Some(b"saved_password"), Some(password)) => {
            call.vm.mailbox.confirm_password(password.expose());
            SAVED
        }
        _ => "bad_request",
    };
    Response::new(StatusCode(200), Some(TEXT), &[], text.to_owned())
}

#[cfg(test)]
mod tests {
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

    /// The guest, after the password of its record was noted, as the agent does before it renders a record.
    fn noted(guest: DialectGuest, password: &str) -> DialectGuest {
        guest.responses().vm().mailbox.note_record("web", Some(password));
        guest
    }

    fn flat(mut record: Value) -> DialectGuest {
        record["serve"] = json!({ "date_tree": "cloudstack" });
        DialectGuest::of(&record)
    }

    #[test]
    fn every_listed_name_of_the_flat_tree_is_served() {
        let mut ipv6 = full();
        ipv6["network"]["nics"] =
            json!([nic(1, &json!([{ "method": "static", "address": "2001:db8::5/64" }]))]);
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
        let guest = noted(DialectGuest::of(&with_password("first")), "first");
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
    fn a_confirmation_is_for_the_password_that_the_guest_was_given() {
        let (send, saved) = ([(REQUEST, "send_my_password")], [(REQUEST, "saved_password")]);
        let answer = |text: &str| (200, text.to_owned());
        let old = noted(DialectGuest::of(&with_password("first")), "first");
        assert_eq!(ask(&old, "/", &send), answer("first"));
        // The record has changed, and its answers are not published yet.
        let old = noted(old, "second");
        assert_eq!(ask(&old, "/", &saved), answer("saved_password"));
        let new = old.changed(&with_password("second"));
        assert_eq!(ask(&new, "/", &saved), answer("saved_password"), "still the first");
        assert_eq!(ask(&new, "/", &send), answer("second"));
        assert_eq!(ask(&new, "/", &saved), answer("saved_password"));
        assert_eq!(ask(&new, "/", &send), answer("saved_password"));
        // An agent that has just started has given nothing yet.
        let again = noted(DialectGuest::of(&with_password("first")), "first");
        assert_eq!(ask(&again, "/", &saved), answer("saved_password"));
        assert_eq!(ask(&again, "/", &send), answer("saved_password"));
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
}
