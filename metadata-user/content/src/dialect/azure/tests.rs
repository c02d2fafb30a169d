use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::VERSIONS;
use crate::dialect::render;
use crate::dialect::tests::{TestRequest, full, parse, rendered};
use crate::http::{Method, Response};
use crate::mailbox::Mailbox;
use crate::sink::{Outbox, WAITING_PER_VM};
use crate::store::{Interner, Responses, VmState};
use crate::token::Keyring;
use metadata_common::time::Now;

const IMDS: &str = "169.254.169.254";
const WIRESERVER: &str = "168.63.129.16";
const METADATA: (&str, &str) = ("Metadata", "True");

/// Sends a request at a second of 1970.
fn send(
    responses: &Responses,
    at: u64,
    to: &str,
    fields: &[(&str, &str)],
    method: Method,
    target: &str,
    body: &[u8],
) -> Response {
    let now = Now { mono: Duration::from_secs(at), unix_seconds: at };
    let request = TestRequest::new(method, target, fields);
    TestRequest { now, local: (to, 80), body, ..request }.answer(responses)
}

/// Sends a GET as clients do, with the most common version and more parameters.
fn get(responses: &Responses, below: &str, more: &str) -> Response {
    let target = format!("/metadata/instance{below}?api-version=2021-08-01{more}");
    send(responses, 0, IMDS, &[METADATA], Method::Get, &target, b"")
}

fn text(response: &Response) -> String {
    assert_eq!(response.status().0, 200);
    assert_eq!(response.field("Content-Type"), Some("text/plain; charset=utf-8"));
    String::from_utf8(response.body().to_bytes().to_vec()).expect("text")
}

fn document(response: &Response) -> Value {
    serde_json::from_slice(&response.body().to_bytes()).expect("JSON")
}

fn token(record: &Value, at: u64, query: &str) -> (u16, Value) {
    let target = format!("/metadata/identity/oauth2/token?api-version=2018-02-01{query}");
    let answer = send(&rendered(record), at, IMDS, &[METADATA], Method::Get, &target, b"");
    (answer.status().0, serde_json::from_slice(&answer.body().to_bytes()).unwrap_or_default())
}

#[test]
fn queries_that_azure_refuses_are_refused_with_a_reason() {
    let responses = rendered(&full());
    for (target, status, newest) in [
        ("?api-version=2017-03-01", 200, false),
        ("?api-version=2031-12-31", 200, false),
        ("?API-Version=2021-08-01&format=JSON", 200, false),
        ("?api-version=2017-02-28", 400, true),
        ("?api-version=2021-13-01", 400, true),
        ("?api-version=2021-08-00", 400, true),
        ("?api-version=2021-8-1", 400, true),
        ("?api-version=latest", 400, true),
        ("?api-version=", 400, true),
        ("?api-version=2021-08-01&api-version=2021-08-01", 400, false),
        ("?api-version=2021-08-01&format=text&Format=text", 400, false),
        ("?api-version=2021-08-01&format=xml", 400, false),
        ("/compute/vmId?api-version=2021-08-01", 400, false),
        ("/compute/vmId?api-version=2021-08-01&format=json", 400, false),
        ("/compute/vmId/more?api-version=2021-08-01&format=text", 404, false),
        ("/network/interface/2?api-version=2021-08-01", 404, false),
        ("/network/interface/00?api-version=2021-08-01", 404, false),
    ] {
        let target = format!("/metadata/instance{target}");
        let answer = send(&responses, 0, IMDS, &[METADATA], Method::Get, &target, b"");
        assert_eq!(answer.status().0, status, "{target}");
        if status == 400 {
            assert_eq!(answer.field("Content-Type"), Some("application/json"), "{target}");
            assert!(document(&answer)["error"].as_str().is_some_and(|e| e.starts_with("Bad request. ")));
            assert_eq!(document(&answer).get("newest-versions").is_some(), newest, "{target}");
        }
    }
    assert!(VERSIONS.is_sorted());
}

#[test]
fn every_documented_member_of_compute_exists() {
    let mut record = full();
    record["vm"]["project"]["id"] = json!("group");
    let compute = document(&get(&rendered(&record), "/compute", ""));
    for path in [
        "azEnvironment additionalCapabilities/hibernationEnabled customData evictionPolicy extendedLocation/type",
        "extendedLocation/name host/id hostGroup/id isHostCompatibilityLayerVm licenseType location name offer",
        "osProfile/adminUsername osProfile/computerName osProfile/disablePasswordAuthentication osType",
        "physicalZone placementGroupId plan/name plan/product plan/publisher platformUpdateDomain",
        "platformFaultDomain platformSubFaultDomain priority provider publicKeys/0/keyData publisher",
        "resourceGroupName resourceId sku securityProfile/secureBootEnabled securityProfile/virtualTpmEnabled",
        "securityProfile/encryptionAtHost securityProfile/securityType storageProfile/imageReference/exactVersion",
        "storageProfile/osDisk/managedDisk/id storageProfile/dataDisks storageProfile/resourceDisk/size",
        "subscriptionId tags tagsList/0/name userData version virtualMachineScaleSet/id vmId vmScaleSetName",
        "vmSize zone",
    ]
    .iter()
    .flat_map(|line| line.split(' '))
    {
        let found = compute.pointer(&format!("/{path}"));
        assert!(found.is_some_and(|found| !found.is_null() && !found.is_number()), "{path}: {found:?}");
    }
    // Talos and Kubernetes take the group from the id.
    let id = compute["resourceId"].as_str().expect("text");
    assert!(id.starts_with("/subscriptions/") && id.contains("/resourceGroups/group/providers/"), "{id}");
}

#[test]
fn requests_without_the_header_or_through_a_proxy_are_refused() {
    let responses = rendered(&full());
    let proxied = ("x-forwarded-for", "");
    for path in [
        "/metadata/instance",
        "/metadata/versions",
        "/metadata/scheduledevents",
        "/metadata/loadbalancer",
        "/metadata/identity/oauth2/token",
    ] {
        for fields in [&[][..], &[("Metadata", "false")], &[METADATA, proxied]] {
            let answer = send(
                &responses,
                0,
                IMDS,
                fields,
                Method::Get,
                &format!("{path}?api-version=2021-08-01"),
                b"",
            );
            assert_eq!(answer.status().0, 400, "{path}");
        }
        // Guests acknowledge events by POST.
        let (method, allowed) = match path {
            "/metadata/scheduledevents" => (Method::Put, "GET, HEAD, POST"),
            _ => (Method::Post, "GET, HEAD"),
        };
        let refused = send(&responses, 0, IMDS, &[METADATA], method, path, b"");
        assert_eq!((refused.status().0, refused.field("Allow")), (405, Some(allowed)), "{path}");
    }
    let wireserver = send(&responses, 0, WIRESERVER, &[proxied], Method::Get, "/machine?comp=goalstate", b"");
    assert_eq!(wireserver.status().0, 400);
}

#[test]
fn values_have_the_requested_form() {
    let responses = rendered(&full());
    for (below, body) in [
        ("", "compute/\nnetwork/"),
        ("/network/interface", "0/\n1/"),
        ("/network/interface/0/ipv4/ipAddress/0/", "privateIpAddress\npublicIpAddress"),
        ("/NETWORK/Interface/0/IPv4/ipaddress/0/privateipaddress", "10.0.2.15"),
        ("/network/interface/1/ipv6/ipAddress", ""),
        ("/compute/zone", ""),
        ("/compute/publicKeys/0/path", "/home/alice/.ssh/authorized_keys"),
    ] {
        let below = below.trim_end_matches('/');
        assert_eq!(text(&get(&responses, below, "&format=text")), body, "{below}");
    }
    assert_eq!(
        document(&get(&responses, "/compute/tagsList", "")),
        json!([{ "name": "role", "value": "web" }])
    );
}

#[test]
fn extended_members_are_served_on_request() {
    let responses = rendered(&full());
    let names = |more: &str| -> Vec<String> {
        document(&get(&responses, "", more)).as_object().expect("an object").keys().cloned().collect()
    };
    assert_eq!(names(""), ["compute", "network"]);
    assert_eq!(names("&extended=false"), ["compute", "network"]);
    assert_eq!(names("&extended=true"), ["compute", "extended", "network"]);
    assert_eq!(get(&responses, "/extended", "").status().0, 404);
    let flag = get(&responses, "/extended/compute/hasCustomData", "&extended=true&format=text");
    assert_eq!(text(&flag), "false");
}

#[test]
fn versions_and_events_need_no_api_version() {
    let responses = rendered(&full());
    let ask = |path| document(&send(&responses, 0, IMDS, &[METADATA], Method::Get, path, b""));
    assert_eq!(ask("/metadata/versions"), json!({ "apiVersions": VERSIONS.as_slice() }));
    assert_eq!(ask("/metadata/scheduledevents"), json!({ "DocumentIncarnation": 1, "Events": [] }));
    let attested = send(&responses, 0, IMDS, &[METADATA], Method::Get, "/metadata/attested/document", b"");
    assert_eq!(attested.status().0, 404);
}

#[test]
fn a_bare_record_has_empty_strings_and_no_network() {
    let mut record = full();
    for field in ["user_data", "ssh_keys", "metadata", "admin", "credentials", "network"] {
        record.as_object_mut().expect("a mapping").remove(field);
    }
    record["placement"] = json!({ "region": "r", "zone": "r-a" });
    let whole = document(&get(&rendered(&record), "", ""));
    assert_eq!(whole.get("network"), None, "so that cloud-init falls back to DHCP");
    let compute = &whole["compute"];
    for (name, value) in [("userData", ""), ("tags", ""), ("platformFaultDomain", "r-a")] {
        assert_eq!(compute[name], value, "{name}");
    }
    assert_eq!(compute["osProfile"]["adminUsername"], "");
    assert_eq!((&compute["publicKeys"], &compute["tagsList"]), (&json!([]), &json!([])));
    record["network"] = json!({ "mode": "none", "nics": full()["network"]["nics"] });
    assert_eq!(document(&get(&rendered(&record), "", "")).get("network"), None);
}

#[test]
fn addresses_are_listed_in_the_order_that_cloud_init_needs() {
    let interface = |addresses: Value| {
        let mut record = full();
        record["network"] = json!({ "nics": [
            { "id": "n0", "mac": "52:54:00:ab:cd:ef", "addresses": addresses },
            { "id": "v", "vlan": { "link": "n0", "id": 5 }, "addresses": [{ "method": "dhcp4" }] },
        ] });
        let network = document(&get(&rendered(&record), "/network", ""));
        assert_eq!(network["interface"].as_array().map(Vec::len), Some(1), "without the VLAN");
        network["interface"][0].clone()
    };
    let v6_only =
        interface(json!([{ "method": "static", "address": "2001:db8::15/64", "gateway": "fe80::1" }]));
    let wanted = json!({
        "ipv4": { "ipAddress": [], "subnet": [] },
        "ipv6": {
            "ipAddress": [{ "privateIpAddress": "2001:db8::15", "publicIpAddress": "2001:db8::15" }],
            "subnet": [{ "address": "2001:db8::", "prefix": "64" }],
        },
        "macAddress": "525400ABCDEF",
    });
    assert_eq!(v6_only, wanted);
    let leases = interface(json!([
        { "method": "static", "address": "10.1.2.3/0" },
        { "method": "dhcp4" },
        { "method": "dhcp4" },
        { "method": "dhcp6" },
        { "method": "slaac" },
    ]));
    let wanted = json!([
        { "publicIpAddress": "" },
        { "privateIpAddress": "10.1.2.3", "publicIpAddress": "" },
    ]);
    assert_eq!(leases["ipv4"]["ipAddress"], wanted, "cloud-init requests the first one by DHCP");
    assert_eq!(leases["ipv4"]["subnet"], json!([{ "address": "0.0.0.0", "prefix": "0" }]));
    assert_eq!(leases["ipv6"], json!({ "ipAddress": [{}] }));
    // cloud-init leaves out a NIC without entries.
    let advertised = interface(json!([{ "method": "slaac" }]));
    assert_eq!(
        (&advertised["ipv4"]["ipAddress"], &advertised["ipv6"]),
        (&json!([]), &json!({ "ipAddress": [{}] }))
    );
    let both = interface(json!([{ "method": "dhcp4" }, { "method": "slaac" }]));
    assert_eq!(both["ipv6"], json!({ "ipAddress": [] }));
}

#[test]
fn user_data_is_served_unchanged_and_not_copied() {
    let bytes: Vec<u8> = (0..=255).cycle().take(3_000).collect();
    let mut record = full();
    record["user_data"] = json!({ "base64": STANDARD.encode(&bytes) });
    let responses = rendered(&record);
    let ask = || get(&responses, "/compute/userData", "&format=text");
    assert_eq!(STANDARD.decode(text(&ask())).expect("base64"), bytes);
    assert_eq!(ask().body().pieces()[0].as_ptr(), ask().body().pieces()[0].as_ptr());
    let whole = document(&get(&responses, "", "&extended=true"));
    assert_eq!(STANDARD.decode(whole["compute"]["userData"].as_str().expect("text")).expect("base64"), bytes);
}

#[test]
fn unread_user_data_is_503() {
    let mut record = full();
    record["user_data"] = json!({ "source": { "file": "user-data" } });
    let responses = rendered(&record);
    for (below, more, status) in [
        ("", "", 503),
        ("/Compute", "", 503),
        ("/compute/userdata", "&format=text", 503),
        ("/compute", "&format=text", 200),
        ("/compute/vmId", "&format=text", 200),
        ("/network", "", 200),
    ] {
        assert_eq!(get(&responses, below, more).status().0, status, "{below}");
    }
}

#[test]
fn a_managed_identity_has_a_token_for_any_resource() {
    let mut record = full();
    let none = json!({ "error": "invalid_request", "error_description": "Identity not found" });
    assert_eq!(token(&record, 0, "&resource=r"), (400, none.clone()));
    record["credentials"]["managed_identity"] =
        json!({ "client_id": "c1", "text": "opaque-token", "expires": "1970-01-01T01:00:00Z" });
    let wanted = json!({
        "access_token": "opaque-token",
        "client_id": "c1",
        "expires_in": "3000",
        "expires_on": "3600",
        "not_before": "600",
        "resource": "https://vault.azure.net",
        "token_type": "Bearer",
    });
    assert_eq!(token(&record, 600, "&resource=https%3A%2F%2Fvault.azure.net&client_id=C1"), (200, wanted));
    for (query, why) in [
        ("&resource=r&client_id=c2", "Identity not found"),
        ("&resource=r&object_id=x", "Identity not found"),
        ("&resource=", "Required query variable 'resource' is missing"),
    ] {
        let wanted = json!({ "error": "invalid_request", "error_description": why });
        assert_eq!(token(&record, 0, query), (400, wanted), "{query}");
    }
    assert_eq!(token(&record, 3_600, "&resource=r").0, 503, "the token has expired");
    record["credentials"]["managed_identity"] = json!({ "client_id": "c1", "source": { "file": "token" } });
    assert_eq!(token(&record, 0, "&resource=r").0, 503, "the source is not read yet");
}

#[test]
fn reports_succeed_even_if_the_sink_has_no_room() {
    let mut record = full();
    record["sinks"] = json!({ "ready": "file:/run/ready.jsonl" });
    let record = parse(&record);
    // Nothing delivers from this queue.
    let outbox = crate::sink::unattended();
    let mailbox = Arc::new(Mailbox::new(record.vm.uuid.as_str(), &outbox));
    let vm = VmState::of(&record, Arc::new(Keyring::ephemeral()), mailbox);
    let responses = render(&record, &mut Interner::new(), vm);
    for n in 1..=WAITING_PER_VM + 10 {
        let (target, status) = match n % 3 {
            0 => ("/machine?comp=health", 200),
            1 => ("/machine?comp=roleProperties", 202),
            _ => ("/provisioning/health", 201),
        };
        let answer = send(&responses, 0, WIRESERVER, &[], Method::Post, target, b"<Health/>");
        assert_eq!(answer.status().0, status, "{target}");
    }
    let counts = Outbox::counts(&outbox);
    assert_eq!((counts.waiting, counts.dropped), (WAITING_PER_VM as u64, 10));
}
