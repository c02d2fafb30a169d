//! Requests of agents to the wireserver and to the host plug-in.

use roxmltree::Document;
use serde_json::{Value, json};

use crate::dialect::tests::{DialectGuest, TestRequest, bare, full, text};
use crate::http::target::normalise;
use crate::http::{Method, Response};
use crate::store::path::HOST_PLUGIN_PORT;

const WIRESERVER: (&str, u16) = ("168.63.129.16", 80);
const HOST_PLUGIN: (&str, u16) = ("168.63.129.16", HOST_PLUGIN_PORT);

fn ask(guest: &DialectGuest, at: (&str, u16), method: Method, target: &str) -> Response {
    guest.ask_at(at, method, target, &[])
}

/// Returns the document at a URL of the wireserver.
fn read(guest: &DialectGuest, url: &str) -> String {
    let target = url.strip_prefix("http://168.63.129.16").expect("a URL of the wireserver");
    let target = normalise(target).expect("a target");
    let request = TestRequest::new(Method::Get, "/", &[]);
    let request = TestRequest { local: WIRESERVER, target: target.target(), ..request };
    let response = request.answer(guest.responses());
    assert_eq!(response.status().0, 200, "{url}");
    assert_eq!(response.field("Content-Type"), Some("text/xml; charset=utf-8"), "{url}");
    text(&response)
}

const GOAL_STATE: &str = "http://168.63.129.16/machine/?comp=goalstate";

/// Returns the text of the only element with a name.
fn element<'a>(document: &'a Document<'_>, name: &str) -> &'a str {
    let mut all = document.descendants().filter(|node| node.has_tag_name(name));
    let first = all.next().unwrap_or_else(|| panic!("no {name}"));
    assert!(all.next().is_none(), "{name} twice");
    first.text().unwrap_or_default()
}

/// Returns an attribute of the first element with a name.
fn attribute(document: &Document<'_>, element: &str, name: &str) -> Option<String> {
    let node = document.descendants().find(|node| node.has_tag_name(element))?;
    node.attribute(name).map(str::to_owned)
}

/// Returns the document of one kind, found through the goal state.
fn configuration(guest: &DialectGuest, kind: &str) -> String {
    let goal_state = read(guest, GOAL_STATE);
    let goal_state = Document::parse(&goal_state).expect("a goal state");
    read(guest, element(&goal_state, kind))
}

#[test]
fn the_wireserver_accepts_the_requests_of_its_clients() {
    let guest = DialectGuest::of(&full());
    for (method, target, status) in [
        (Method::Head, "/?COMP=VERSIONS", 200),
        (Method::Get, "/", 404),
        (Method::Get, "/?comp=other", 404),
        (Method::Get, "/machine?type=x&comp=GoalState", 200),
        (Method::Get, "/machine?comp=config&type=sharedConfig&incarnation=1", 200),
        (Method::Get, "/machine?comp=config&type=fullConfig", 404),
        (Method::Get, "/machine?comp=config", 404),
        (Method::Get, "/machine?comp=certificates", 404),
        (Method::Post, "/machine?comp=health", 200),
        (Method::Post, "/machine?comp=RoleProperties", 202),
        (Method::Post, "/machine?comp=telemetrydata", 200),
        (Method::Post, "/HealthService", 200),
        (Method::Post, "/provisioning/health", 201),
        (Method::Get, "/machine", 404),
        (Method::Get, "/machine?comp=health", 405),
        (Method::Get, "/machine?comp=telemetrydata", 405),
        (Method::Post, "/machine?comp=goalstate", 405),
        (Method::Post, "/machine?comp=config&type=sharedConfig", 405),
        (Method::Get, "/provisioning/health", 405),
        (Method::Get, "/HealthService", 405),
        (Method::Get, "/metadata/instance", 404),
        (Method::Get, "/vmSettings", 404),
        (Method::Get, "/versions", 404),
    ] {
        let answer = ask(&guest, WIRESERVER, method, target);
        assert_eq!(answer.status().0, status, "{target}");
        assert_eq!(answer.field("Allow").is_some(), status == 405, "{target}");
    }
    let elsewhere = ask(&guest, ("169.254.169.254", 80), Method::Get, "/machine?comp=goalstate");
    assert_eq!(elsewhere.status().0, 404, "the wireserver has its own address");
}

#[test]
fn the_host_plug_in_accepts_reports_and_has_no_settings() {
    let guest = DialectGuest::of(&full());
    for (method, target, status) in [
        (Method::Get, "/versions", 200),
        (Method::Get, "/health", 200),
        (Method::Get, "/vmSettings", 404),
        (Method::Get, "/extensionArtifact", 404),
        (Method::Put, "/status", 201),
        (Method::Put, "/status?comp=page", 201),
        (Method::Put, "/vmAgentLog", 201),
        (Method::Get, "/status", 405),
        (Method::Get, "/machine?comp=goalstate", 404),
    ] {
        assert_eq!(ask(&guest, HOST_PLUGIN, method, target).status().0, status, "{target}");
    }
    let versions = text(&ask(&guest, HOST_PLUGIN, Method::Get, "/versions"));
    assert_eq!(serde_json::from_str::<Value>(&versions).expect("JSON"), json!(["2015-09-01"]));
    let proxied = [("X-Forwarded-For", "10.0.0.1")];
    assert_eq!(guest.ask_at(HOST_PLUGIN, Method::Get, "/health", &proxied).status().0, 400);
}

#[test]
fn the_goal_state_names_each_configuration_that_agents_fetch() {
    let guest = DialectGuest::of(&full());
    let goal_state = read(&guest, GOAL_STATE);
    let goal_state = Document::parse(&goal_state).expect("a goal state");
    assert_eq!(element(&goal_state, "Version"), "2012-11-30");
    assert_eq!(element(&goal_state, "Incarnation"), "7");
    assert_eq!(element(&goal_state, "ConfigName"), "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d.7.xml");
    assert!(!goal_state.descendants().any(|node| node.has_tag_name("Certificates")));
    let environment = configuration(&guest, "HostingEnvironmentConfig");
    let environment = Document::parse(&environment).expect("a document");
    for (element, name, value) in
        [("Incarnation", "instance", "web-1"), ("Role", "name", "web-1"), ("Deployment", "name", "p1")]
    {
        assert_eq!(attribute(&environment, element, name).as_deref(), Some(value), "{element}");
    }
    let extensions = configuration(&guest, "ExtensionsConfig");
    let extensions = Document::parse(&extensions).expect("a document");
    assert_eq!(element(&extensions, "StatusUploadBlob"), "http://168.63.129.16:32526/status");
    assert_eq!(
        attribute(&extensions, "StatusUploadBlob", "statusBlobType").as_deref(),
        Some("BlockBlob"),
        "the agent knows this type and page blobs"
    );
    assert_eq!(element(&extensions, "Plugins"), "");
    let manifest = read(&guest, element(&extensions, "Uri"));
    let manifest = Document::parse(&manifest).expect("a document");
    assert_eq!(element(&manifest, "Plugins"), "", "no newer agent is offered");
}

#[test]
fn the_shared_configuration_has_the_known_addresses() {
    let shared = |record: &Value| {
        let document = configuration(&DialectGuest::of(record), "SharedConfig");
        let document = Document::parse(&document).expect("a document");
        assert_eq!(document.descendants().filter(|node| node.has_tag_name("Instances")).count(), 1);
        let own = attribute(&document, "Incarnation", "instance");
        if let Some(id) = attribute(&document, "Instance", "id") {
            assert_eq!(Some(id), own, "Afterburn finds its instance by this id");
            assert_eq!(document.descendants().filter(|node| node.has_tag_name("InputEndpoints")).count(), 1);
        }
        [
            attribute(&document, "Instance", "address"),
            attribute(&document, "Endpoint", "loadBalancedPublicAddress"),
        ]
    };
    let both = ["10.0.2.15", "203.0.113.7:22"].map(|address| Some(address.to_owned()));
    assert_eq!(shared(&full()), both);
    assert_eq!(shared(&bare()), [None, None]);
    let mut record = bare();
    let addresses = |addresses: Value| json!({ "nics": [{ "id": "n0", "mac": "52:54:00:ab:cd:ef", "addresses": addresses }] });
    record["network"] = addresses(json!([{ "method": "dhcp4" }, { "method": "dhcp6" }]));
    assert_eq!(shared(&record), [None, None]);
    record["network"] = addresses(json!([{ "method": "static", "address": "10.1.2.3/24" }]));
    assert_eq!(shared(&record), [Some("10.1.2.3".to_owned()), None]);
}

#[test]
fn names_are_escaped_in_every_document() {
    let mut record = full();
    let name = "<a> & \"b\" \u{1f680} \u{ffff}";
    record["vm"]["name"] = json!(name);
    record["vm"]["project"]["id"] = json!(name);
    record["placement"]["region"] = json!(name);
    record["generation"] = json!(12_345_678_901_u64);
    let guest = DialectGuest::of(&record);
    let name = "<a> & \"b\" \u{1f680} \u{fffd}";
    let goal_state = read(&guest, GOAL_STATE);
    let goal_state = Document::parse(&goal_state).expect("a goal state");
    assert_eq!(element(&goal_state, "InstanceId"), name);
    assert_eq!(element(&goal_state, "Incarnation"), "12345678901");
    assert!(
        element(&goal_state, "ConfigName").bytes().all(|b| b.is_ascii_graphic()),
        "the agent sends it in a header field"
    );
    for kind in ["HostingEnvironmentConfig", "SharedConfig"] {
        let document = configuration(&guest, kind);
        let document = Document::parse(&document).expect("a document");
        assert_eq!(attribute(&document, "Role", "name").as_deref(), Some(name), "{kind}");
        assert_eq!(attribute(&document, "Deployment", "name").as_deref(), Some(name), "{kind}");
    }
    let extensions = configuration(&guest, "ExtensionsConfig");
    assert_eq!(element(&Document::parse(&extensions).expect("a document"), "Location"), name);
}

#[test]
fn an_image_has_its_azure_names_or_empty_ones() {
    const NAMES: [&str; 4] = ["publisher", "offer", "sku", "version"];
    let compute = |record: &Value| {
        let guest = DialectGuest::of(record);
        NAMES.map(|name| {
            let path = format!("/metadata/instance/compute/{name}");
            let target = format!("{path}?api-version=2021-08-01&format=text");
            let fields = [("Metadata", "true")];
            let response = guest.ask(Method::Get, &target, &fields);
            assert_eq!(response.status().0, 200, "{name}");
            text(&response)
        })
    };
    assert_eq!(compute(&full()), [""; 4]);
    assert_eq!(compute(&bare()), [""; 4]);
    let mut record = full();
    for (n, name) in NAMES.into_iter().enumerate() {
        record["image"][name] = json!(format!("v{n}"));
    }
    assert_eq!(compute(&record), ["v0", "v1", "v2", "v3"]);
}

#[test]
fn only_guests_of_azure_have_the_host_plug_in() {
    use crate::store::Host;
    assert!(DialectGuest::of(&full()).responses().has(Host::HostPlugin));
    let mut record = full();
    record["serve"]["dialects"] = json!(["nocloud", "ec2"]);
    assert!(!DialectGuest::of(&record).responses().has(Host::HostPlugin));
    record["serve"]["dialects"] = json!(["azure"]);
    assert!(DialectGuest::of(&record).responses().has(Host::HostPlugin));
}
