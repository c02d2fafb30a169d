//! AliYun (Alibaba Cloud): one document at `meta-data/all`, and its members as a tree for other clients.
//!
//! The dialect has its own address. cloud-init gives up without a token, so its guests cannot use `imdsv2: off`
//! (`cloudinit/sources/DataSourceAliYun.py`).

use bytes::Bytes;
use serde_json::{Map, Value};
use std::sync::{Arc, LazyLock};

use super::document::{DocumentNode, PartKind};
use super::events::utc;
use super::route_builder::{BYTES, JSON, RouteBuilder, TEXT, computed};
use super::tokens::{UNPROXIED, audience, signed};
use super::{AccessCondition, Description, Mount, tokens};
use crate::dialect::json::json;
use crate::http::{Response, StatusCode};
use crate::identity::{SigningRequest, VmIssuer};
use crate::record;
use crate::record::event::EventKind;
use crate::record::values::Cidr;
use crate::record::{Dialect, Imdsv2, Nic, Record};
use crate::store::{Host, LiveOutcome, LiveRequest, LiveRoute, Methods, RequestGuard};
use crate::token::TokenKind;

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/latest").at(Host::AliYun).needs(AccessCondition::Imdsv2(TOKEN))],
    "`DataSourceAliYun`; systemd-imdsd",
    render,
)
.remark(
    "any date for `latest`; `PUT /latest/api/token`; `dynamic/instance-identity` with `identity.certificate`",
);

/// Header field with the token.
const TOKEN: &str = TokenKind::AliYun.field();
/// Header field with the requested lifetime of a token, in seconds.
const TTL: &str = "X-aliyun-ecs-metadata-token-ttl-seconds";

static OPTIONAL: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| [tokens::optional(TOKEN, TokenKind::AliYun)]);
static REQUIRED: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| [tokens::required(TOKEN, TokenKind::AliYun)]);
/// The same, including for requests through a proxy.
static OPTIONAL_UNPROXIED: LazyLock<[RequestGuard; 2]> =
    LazyLock::new(|| [UNPROXIED[0].clone(), OPTIONAL[0].clone()]);
static REQUIRED_UNPROXIED: LazyLock<[RequestGuard; 2]> =
    LazyLock::new(|| [UNPROXIED[0].clone(), REQUIRED[0].clone()]);

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    routes.at(Host::AliYun);
    let guards: &'static [RequestGuard] = match record.serve.imdsv2 {
        Imdsv2::Required => &*REQUIRED,
        Imdsv2::Optional | Imdsv2::Off => &*OPTIONAL,
    };
    match record.serve.imdsv2 {
        Imdsv2::Off => tokens::absent(routes),
        _ => tokens::present(routes, TokenKind::AliYun, TTL, record.serve.hop_limit.get()),
    }
    let signs = signed_document(record, routes, guards);
    let listing = if signs {
        "dynamic\nmeta-data\nuser-data\nvendor-data"
    } else {
        "meta-data\nuser-data\nvendor-data"
    };
    let listing = routes.found(TEXT, listing);
    routes.guarded("/latest", guards, listing);
    let payloads = [("/latest/user-data", &record.user_data), ("/latest/vendor-data", &record.vendor_data)];
    for (path, payload) in payloads {
        let response = match payload {
            Some(payload) => routes.payload(payload),
            None => routes.found(BYTES, ""),
        };
        routes.guarded(path, guards, response);
    }
    let mut document = document(record);
    if let Some(known) = routes.events().pending().find(|known| known.event.kind == EventKind::Preempt) {
        document["instance"]["spot"] = json!({ "termination-time": utc(&known.time()) });
    }
    let document = routes.document(&document);
    // `all`, and each of its members as a directory or a leaf, as EC2's tree does.
    let tree = computed("`all` as JSON, and its members as a tree", move |call| {
        if call.rest == "/all" {
            return Response::new(StatusCode(200), Some(JSON), &[], document.body());
        }
        match document.at(call.rest) {
            Some(node) if node.form() == PartKind::Object => {
                Response::new(StatusCode(200), Some(TEXT), &[], directory(node))
            }
            Some(leaf) => Response::new(StatusCode(200), Some(TEXT), &[], leaf.text()),
            None => Response::error(StatusCode(404), &[]),
        }
    });
    routes.live_below("/latest/meta-data", Methods::READ, guards, tree);
}

fn document(record: &Record) -> Value {
    let mut document = json!({
        "hostname": record.hostname.short.as_str(),
        "instance": {
            "instance-name": record.vm.name.as_str(),
            "instance-type": record.instance_type(),
        },
        "instance-id": record.ec2_id(),
        "network-type": "vpc",
        "owner-account-id": record.vm.project.account.as_str(),
        "region-id": record.placement.region.as_str(),
        "serial-number": record.unique_uuid(),
        "vpc-id": record.vpc_id(),
        "zone-id": record.placement.zone.as_str(),
    });
    let mut own = |key: &str, value: Value| document[key] = value;
    if let Some(id) = record.ami_id() {
        own("image-id", id.into());
    }
    let network = &record.network;
    if !network.dns.is_empty() {
        let servers: Vec<String> = network.dns.iter().map(ToString::to_string).collect();
        own("dns-conf", json!({ "nameservers": servers.join("\r\n") }));
    }
    if let Some(cidr) = network.nics.first().and_then(|nic| nic.ipv4().next()) {
        own("private-ipv4", cidr.address.to_string().into());
        own("vswitch-cidr-block", cidr.network().to_string().into());
        own("vpc-cidr-block", cidr.network().to_string().into());
    }
    if let Some(id) = network.nics.first().and_then(vswitch_id) {
        own("vswitch-id", id.into());
    }
    // Some clients read a translated address as `eipv4`, others as `public-ipv4`.
    if let Some(public) = network.nics.first().and_then(|nic| nic.public_ipv4().next()) {
        own("eipv4", public.to_string().into());
        own("public-ipv4", public.to_string().into());
    }
    let macs: Map<String, Value> = network
        .nics
        .iter()
        .filter(|nic| nic.is_physical())
        .filter_map(|nic| Some((nic.mac?.to_string(), interface(record, nic))))
        .collect();
    if let Some(mac) = network.nics.iter().find(|nic| nic.is_physical()).and_then(|nic| nic.mac) {
        own("mac", mac.to_string().into());
        own("network", json!({ "interfaces": { "macs": macs } }));
    }
    if !record.ssh_keys.is_empty() {
        let key = |(n, key): (usize, &record::vm::SshKey)| {
            (n.to_string(), json!({ "openssh-key": key.key.as_str() }))
        };
        own("public-keys", Value::Object(record.ssh_keys.iter().enumerate().map(key).collect()));
    }
    document
}

/// Returns one NIC: what is known of each address family, in the forms that Alibaba's CNI plugin reads.
fn interface(record: &Record, nic: &Nic) -> Value {
    let mut interface = json!({ "network-interface-id": nic.eni_id(), "vpc-id": record.vpc_id() });
    let mut own = |key: &str, value: String| interface[key] = value.into();
    if let Some(id) = vswitch_id(nic) {
        own("vswitch-id", id);
    }
    let all = |cidrs: &[Cidr]| cidrs.iter().map(|cidr| cidr.address.to_string()).collect::<Vec<_>>();
    let gateway = |v4: bool| {
        let mut gateways = nic.addresses.iter().filter_map(|entry| entry.gateway.map(|gateway| gateway.0));
        gateways
            .find(|gateway| gateway.is_ipv4() == v4)
            .map(|gateway| gateway.to_string())
            .unwrap_or_default()
    };
    let (v4, v6): (Vec<Cidr>, Vec<Cidr>) = (nic.ipv4().collect(), nic.ipv6().collect());
    if let Some(first) = v4.first() {
        own("gateway", gateway(true));
        own("netmask", first.netmask().to_string());
        own("primary-ip-address", first.address.to_string());
        own("private-ipv4s", Value::from(all(&v4)).to_string());
        own("vswitch-cidr-block", first.network().to_string());
        own("vpc-cidr-block", vpc_block(record, true));
    }
    if let Some(first) = v6.first() {
        own("ipv6-gateway", gateway(false));
        // Unlike `private-ipv4s`, without quotes.
        own("ipv6s", format!("[{}]", all(&v6).join(",")));
        own("vswitch-ipv6-cidr-block", first.network().to_string());
        own("vpc-ipv6-cidr-blocks", vpc_block(record, false));
    }
    interface
}

/// Returns the network of the VM's first address of one family. The record knows of its project's network only what the
/// VM has addresses in.
fn vpc_block(record: &Record, v4: bool) -> String {
    let mut cidrs = record.network.nics.iter().flat_map(|nic| nic.ipv4().chain(nic.ipv6()));
    cidrs.find(|cidr| cidr.address.is_ipv4() == v4).map(|cidr| cidr.network().to_string()).unwrap_or_default()
}

fn vswitch_id(nic: &Nic) -> Option<String> {
    nic.subnet_id().map(|id| id.replacen("subnet-", "vsw-", 1))
}

/// Lists the names in an object. Names of objects end with a slash.
fn directory(node: DocumentNode<'_>) -> String {
    let mut text = String::new();
    for (name, member) in node.members() {
        let line = if text.is_empty() { "" } else { "\n" };
        let slash = if member.form() == PartKind::Object { "/" } else { "" };
        text.extend([line, name.as_ref(), slash]);
    }
    text
}

// `dynamic/instance-identity`: the identity document, and its signature by the operator's certificate.
//
// `pkcs7` does not have the document within. `audience=` becomes the document's last member, which the verifier adds
// to its copy (<https://www.alibabacloud.com/help/en/ecs/user-guide/use-instance-identities>). The directory exists
// only on a node with a certificate. The signature is refused through a proxy and does not leave the guest's first
// hop.

const IDENTITY_DIRECTORY: &str = "/latest/dynamic/instance-identity";

static BAD_AUDIENCE: LazyLock<Response> = LazyLock::new(|| Response::error(StatusCode(400), &[]));

/// Adds the directory; returns false on a node that signs no documents.
fn signed_document(record: &Record, routes: &mut RouteBuilder<'_>, guards: &'static [RequestGuard]) -> bool {
    let serves = record.serve.serves(Dialect::AliYun);
    let Some(issuer) = routes.issuer().filter(|issuer| issuer.signs_documents() && serves).cloned() else {
        return false;
    };
    let text: Bytes = identity_document(record).to_string().into();
    let listings = [("/latest/dynamic", "instance-identity/"), (IDENTITY_DIRECTORY, "document\npkcs7")];
    for (path, listing) in listings {
        let response = routes.found(TEXT, listing);
        routes.guarded(path, guards, response);
    }
    let response = routes.found(TEXT, text.clone());
    routes.guarded(format!("{IDENTITY_DIRECTORY}/document"), guards, response);
    let guards =
        if record.serve.imdsv2 == Imdsv2::Required { &*REQUIRED_UNPROXIED } else { &*OPTIONAL_UNPROXIED };
    routes.live(
        format!("{IDENTITY_DIRECTORY}/pkcs7"),
        Methods::READ,
        guards,
        Signed { issuer, document: text },
    );
    true
}

fn identity_document(record: &Record) -> Value {
    let mut document = json!({
        "instance-id": record.ec2_id(),
        "instance-type": record.instance_type(),
        "owner-account-id": record.vm.project.account.as_str(),
        "region-id": record.placement.region.as_str(),
        "serial-number": record.unique_uuid(),
        "zone-id": record.placement.zone.as_str(),
    });
    let nics = &record.network.nics;
    if let Some(id) = record.ami_id() {
        document["image-id"] = id.into();
    }
    if let Some(mac) = nics.iter().find(|nic| nic.is_physical()).and_then(|nic| nic.mac) {
        document["mac"] = mac.to_string().into();
    }
    if let Some(cidr) = nics.first().and_then(|nic| nic.ipv4().next()) {
        document["private-ipv4"] = cidr.address.to_string().into();
    }
    document
}

#[derive(Debug)]
struct Signed {
    issuer: Arc<VmIssuer>,
    document: Bytes,
}

impl Signed {
    /// Returns what a query wants to be signed; `None` if its audience is malformed.
    fn wanted(&self, query: &str) -> Option<SigningRequest> {
        if query.is_empty() {
            return Some(SigningRequest::Detached { document: self.document.clone(), audience: None });
        }
        let audience = audience(query)?;
        let mut text = self.document[..self.document.len() - 1].to_vec();
        text.extend_from_slice(format!(",\"audience\":{}}}", Value::from(audience.as_str())).as_bytes());
        Some(SigningRequest::Detached { document: text.into(), audience: Some(audience) })
    }
}

impl LiveRoute for Signed {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let Some(wanted) = self.wanted(call.request.target.query) else { return BAD_AUDIENCE.clone().into() };
        signed(call, &self.issuer, &wanted)
    }

    fn lacks(&self, call: &LiveRequest<'_>) -> Option<(String, StatusCode)> {
        let is_refused = self.wanted(call.request.target.query).is_none();
        is_refused.then(|| ("no query, or `audience` with a value of its form".into(), StatusCode(400)))
    }

    fn about(&self) -> &'static str {
        "the signature of the identity document by the operator's certificate"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{TOKEN, TTL};
    use crate::dialect::tests::{DialectGuest, Orders, bare, full, issued, nic, ordered, sign, text};
    use crate::http::{Method, Response};
    use crate::identity::SigningJob;
    use crate::store::LiveOutcome;

    const TREE: &str = "/2016-01-01/meta-data";

    fn ask(guest: &DialectGuest, path: &str, fields: &[(&str, &str)]) -> Response {
        guest.ask_at(("100.100.100.200", 80), Method::Get, path, fields)
    }

    fn put(guest: &DialectGuest) -> Response {
        guest.ask_at(("100.100.100.200", 80), Method::Put, "/latest/api/token", &[(TTL, "60")])
    }

    fn all(guest: &DialectGuest) -> Value {
        let response = ask(guest, &format!("{TREE}/all"), &[]);
        serde_json::from_slice(&response.body().to_bytes()).expect("JSON")
    }

    /// Crawls a directory of the tree and rebuilds the JSON value that it shows.
    fn crawled(guest: &DialectGuest, directory: &str) -> Value {
        let mut value = json!({});
        for line in text(&ask(guest, directory, &[])).lines() {
            let name = line.trim_end_matches('/');
            let path = format!("{directory}/{name}");
            value[name] = match line.ends_with('/') {
                true => crawled(guest, &path),
                false => text(&ask(guest, &path, &[])).into(),
            };
        }
        value
    }

    #[test]
    fn the_tree_equals_the_document() {
        let mut keys = full();
        keys["ssh_keys"] = (0..12)
            .map(|n| json!({ "name": format!("k{n}"), "key": format!("k {}", "x".repeat(600)) }))
            .collect();
        for record in [full(), bare(), keys] {
            let guest = DialectGuest::of(&record);
            assert_eq!(crawled(&guest, TREE), all(&guest));
        }
        let guest = DialectGuest::of(&full());
        for absent in
            ["/nope", "/instance/nope", "/instance-id/nope", "/all/nope", "/network/interfaces/macs/0"]
        {
            assert_eq!(ask(&guest, &format!("{TREE}{absent}"), &[]).status().0, 404, "{absent}");
        }
    }

    #[test]
    fn absent_values_are_not_in_the_document() {
        let document = all(&DialectGuest::of(&bare()));
        for absent in
            ["dns-conf", "eipv4", "image-id", "mac", "network", "private-ipv4", "public-ipv4", "public-keys"]
        {
            assert!(document.get(absent).is_none(), "{absent}");
        }
        let mut record = full();
        record["network"]["nics"] =
            json!([nic(1, &json!([{ "method": "static", "address": "2001:db8::5/64" }]))]);
        let document = all(&DialectGuest::of(&record));
        let interfaces = &document["network"]["interfaces"]["macs"];
        let names: Vec<_> =
            interfaces["52:54:00:00:00:01"].as_object().expect("an interface").keys().collect();
        assert_eq!(
            names,
            [
                "ipv6-gateway",
                "ipv6s",
                "network-interface-id",
                "vpc-id",
                "vpc-ipv6-cidr-blocks",
                "vswitch-ipv6-cidr-block"
            ]
        );
        assert!(document.get("private-ipv4").is_none());
    }

    #[test]
    fn all_addresses_and_resolvers_are_listed() {
        let mut record = full();
        record["network"]["dns"] = json!(["10.0.0.1", "2001:db8::53"]);
        record["network"]["nics"] = json!([nic(
            1,
            &json!([
                { "method": "static", "address": "10.0.0.5/22" },
                { "method": "slaac", "gateway": "fe80::1" },
                { "method": "static", "address": "10.0.1.5/22", "gateway": "10.0.0.2" },
                { "method": "static", "address": "2001:db8::5/64" },
                { "method": "static", "address": "2001:db8::6/64" },
            ])
        )]);
        record["network"]["nics"][0]["network_id"] = json!("net-1");
        let document = all(&DialectGuest::of(&record));
        assert_eq!(document["dns-conf"]["nameservers"], "10.0.0.1\r\n2001:db8::53");
        let expected = json!({
            "gateway": "10.0.0.2",
            "ipv6-gateway": "fe80::1",
            "ipv6s": "[2001:db8::5,2001:db8::6]",
            "netmask": "255.255.252.0",
            "network-interface-id": document["network"]["interfaces"]["macs"]["52:54:00:00:00:01"]["network-interface-id"],
            "primary-ip-address": "10.0.0.5",
            "private-ipv4s": r#"["10.0.0.5","10.0.1.5"]"#,
            "vpc-cidr-block": "10.0.0.0/22",
            "vpc-id": document["vpc-id"],
            "vpc-ipv6-cidr-blocks": "2001:db8::/64",
            "vswitch-cidr-block": "10.0.0.0/22",
            "vswitch-id": document["vswitch-id"],
            "vswitch-ipv6-cidr-block": "2001:db8::/64",
        });
        assert!(
            text(&ask(&DialectGuest::of(&record), &format!("{TREE}/vswitch-id"), &[])).starts_with("vsw-")
        );
        assert_eq!(document["network"]["interfaces"]["macs"]["52:54:00:00:00:01"], expected);
    }

    #[test]
    fn the_record_decides_whether_tokens_exist_and_are_needed() {
        let paths = [
            "/latest",
            "/latest/meta-data",
            "/latest/meta-data/all",
            "/latest/user-data",
            "/latest/vendor-data",
        ];
        for (mode, made, without) in [("off", 404, 200), ("optional", 200, 200), ("required", 200, 401)] {
            let mut record = full();
            record["serve"] = json!({ "imdsv2": mode, "hop_limit": 3 });
            let guest = DialectGuest::of(&record);
            let token = put(&guest);
            assert_eq!(token.status().0, made, "{mode}");
            for path in paths {
                assert_eq!(ask(&guest, path, &[]).status().0, without, "{path} under {mode}");
                assert_eq!(ask(&guest, path, &[(TOKEN, "bogus")]).status().0, 401, "{path} under {mode}");
                if made == 200 {
                    assert_eq!(token.hop_limit(), Some(3));
                    assert_eq!(
                        ask(&guest, path, &[(TOKEN, &text(&token))]).status().0,
                        200,
                        "{path} under {mode}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_token_of_ec2_is_invalid_and_other_addresses_have_no_tree() {
        let guest = DialectGuest::of(&full());
        let aws =
            guest.ask(Method::Put, "/latest/api/token", &[("X-aws-ec2-metadata-token-ttl-seconds", "60")]);
        assert_eq!(ask(&guest, "/latest/user-data", &[(TOKEN, &text(&aws))]).status().0, 401);
        assert_eq!(guest.status("/latest/meta-data/all", &[]), 404);
        assert_eq!(guest.status("/latest/vendor-data", &[]), 404);
    }

    const ADDRESS: &str = "100.100.100.200";
    const DIRECTORY: &str = "/latest/dynamic/instance-identity";

    fn get(guest: &DialectGuest, path: &str, fields: &[(&str, &str)]) -> Response {
        guest.ask_at((ADDRESS, 80), Method::Get, path, fields)
    }

    /// Header fields, a query, and the status of the answer.
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a str, u16);

    /// Returns the bytes that are signed for a query.
    fn signed(guest: &DialectGuest, orders: &Orders, query: &str) -> String {
        let target = format!("{DIRECTORY}/pkcs7{query}");
        let LiveOutcome::Park(parked) = guest.get_at(ADDRESS, &target, &[], None) else {
            panic!("{target} does not wait")
        };
        let order = ordered(orders);
        let SigningJob::Detached(document) = order.work() else { panic!("{:?}", order.work()) };
        sign(order, "SIGNED");
        match guest.get_at(ADDRESS, &target, &[], Some(&parked)) {
            LiveOutcome::Ready(answer) => {
                assert_eq!(
                    (answer.status().0, answer.hop_limit(), &*text(&answer)),
                    (200, Some(1), "SIGNED")
                );
            }
            other => panic!("{target}: {other:?}"),
        }
        document
    }

    #[test]
    fn the_signed_bytes_are_the_document_with_the_audience_as_its_last_member() {
        let (guest, orders) = issued(&full(), true);
        let document = text(&get(&guest, &format!("{DIRECTORY}/document"), &[]));
        assert_eq!(signed(&guest, &orders, ""), document);
        let expected = format!(
            "{},\"audience\":\"https://a.example/b\"}}",
            document.strip_suffix('}').expect("an object")
        );
        assert_eq!(signed(&guest, &orders, "?audience=https://a.example/b"), expected);
        let quoted: Value =
            serde_json::from_str(&signed(&guest, &orders, "?audience=a%22,%22b")).expect("JSON");
        assert_eq!(quoted["audience"], json!("a\",\"b"), "no audience adds a member");
        assert_eq!(quoted.as_object().map(|members| members.contains_key("b")), Some(false));
        let fields: Value = serde_json::from_str(&document).expect("JSON");
        assert_eq!(fields["serial-number"], full()["vm"]["uuid"]);
        let text = text(&get(&issued(&bare(), true).0, &format!("{DIRECTORY}/document"), &[]));
        assert!(!text.contains("\"mac\"") && text.contains("\"instance-id\""), "{text}");
    }

    #[test]
    fn the_directory_exists_only_where_documents_are_signed() {
        for (signs, identity, served) in [
            (true, json!({}), true),
            (true, json!({"audiences": ["vault"]}), true),
            (true, json!({"audiences": []}), false),
            (false, json!({}), false),
        ] {
            let mut record = full();
            record["identity"] = identity;
            let (guest, _) = issued(&record, signs);
            assert_eq!(text(&get(&guest, "/latest", &[])).contains("dynamic"), served, "{record}");
            let status = get(&guest, &format!("{DIRECTORY}/document"), &[]).status().0;
            assert_eq!(status, if served { 200 } else { 404 }, "{record}");
        }
    }

    #[test]
    fn a_signature_needs_the_token_an_allowed_audience_and_no_proxy() {
        let mut record = full();
        record["identity"] = json!({"audiences": ["vault"]});
        record["serve"] = json!({"imdsv2": "required"});
        let (guest, _) = issued(&record, true);
        let token = text(&guest.ask_at((ADDRESS, 80), Method::Put, "/latest/api/token", &[(TTL, "60")]));
        let held = [(TOKEN, &*token)];
        let proxied = [(TOKEN, &*token), ("X-Forwarded-For", "10.0.0.1")];
        let cases: [Case<'_>; 5] = [
            (&[], "", 401),
            (&proxied, "", 403),
            (&held, "?audience=other", 403),
            (&held, "?audience=", 400),
            (&held, "?audience=vault&audience=vault", 400),
        ];
        for (fields, query, status) in cases {
            match guest.get_at(ADDRESS, &format!("{DIRECTORY}/pkcs7{query}"), fields, None) {
                LiveOutcome::Ready(answer) => assert_eq!(answer.status().0, status, "{query} {fields:?}"),
                other => panic!("{query}: {other:?}"),
            }
        }
        let good = guest.get_at(ADDRESS, &format!("{DIRECTORY}/pkcs7?audience=vault"), &held, None);
        assert!(matches!(good, LiveOutcome::Park(_)), "{good:?}");
    }
}
