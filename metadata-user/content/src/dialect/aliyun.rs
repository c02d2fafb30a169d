//! AliYun (Alibaba Cloud): one document at `meta-data/all`, and its members as a tree for other clients.
//!
//! The dialect has its own address. cloud-init gives up without a token, so its guests cannot use `imdsv2: off`
//! (`cloudinit/sources/DataSourceAliYun.py`).

#[cfg(test)]
mod tests;

use bytes::Bytes;
use serde_json::{Map, Value};
use std::sync::{Arc, LazyLock};

use super::document::{DocumentNode, JsonDocument, PartKind};
use super::identity::{audience, signed};
use super::route_builder::{BYTES, JSON, RouteBuilder, TEXT};
use super::tokens::UNPROXIED;
use super::{AccessCondition, Description, Mount, tokens};
use crate::dialect::json::json;
use crate::http::{Response, StatusCode};
use crate::identity::{SigningRequest, VmIssuer};
use crate::record;
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
const TOKEN: &str = "X-aliyun-ecs-metadata-token";
/// Header field with the requested lifetime of a token, in seconds.
const TTL: &str = "X-aliyun-ecs-metadata-token-ttl-seconds";

static OPTIONAL: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| [tokens::optional(TOKEN, TokenKind::AliYun)]);
static REQUIRED: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| [tokens::required(TOKEN, TokenKind::AliYun)]);
/// The same, also for requests through a proxy.
static OPTIONAL_UNPROXIED: LazyLock<[RequestGuard; 2]> =
    LazyLock::new(|| [UNPROXIED[0].clone(), OPTIONAL[0].clone()]);
static REQUIRED_UNPROXIED: LazyLock<[RequestGuard; 2]> =
    LazyLock::new(|| [UNPROXIED[0].clone(), REQUIRED[0].clone()]);

fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    sheet.at(Host::AliYun);
    let guards: &'static [RequestGuard] = match record.serve.imdsv2 {
        Imdsv2::Required => &*REQUIRED,
        Imdsv2::Optional | Imdsv2::Off => &*OPTIONAL,
    };
    match record.serve.imdsv2 {
        Imdsv2::Off => tokens::absent(sheet),
        _ => tokens::present(sheet, TokenKind::AliYun, TTL, record.serve.hop_limit.get()),
    }
    let signs = signed_document(record, sheet, guards);
    let listing = if signs {
        "dynamic\nmeta-data\nuser-data\nvendor-data"
    } else {
        "meta-data\nuser-data\nvendor-data"
    };
    let listing = sheet.found(TEXT, listing);
    sheet.guarded("/latest", guards, listing);
    let payloads = [("/latest/user-data", &record.user_data), ("/latest/vendor-data", &record.vendor_data)];
    for (path, payload) in payloads {
        let response = match payload {
            Some(payload) => sheet.payload(payload),
            None => sheet.found(BYTES, ""),
        };
        sheet.guarded(path, guards, response);
    }
    let document = sheet.document(&document(record));
    sheet.live_below("/latest/meta-data", Methods::READ, guards, Tree { document });
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

/// Serves `all`, and each of its members as a directory or a leaf, as EC2's tree does.
#[derive(Debug)]
struct Tree {
    document: JsonDocument,
}

impl LiveRoute for Tree {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        if call.rest == "/all" {
            return Response::new(StatusCode(200), Some(JSON), &[], self.document.body()).into();
        }
        match self.document.at(call.rest) {
            Some(node) if node.form() == PartKind::Object => {
                Response::new(StatusCode(200), Some(TEXT), &[], listing(node)).into()
            }
            Some(leaf) => Response::new(StatusCode(200), Some(TEXT), &[], leaf.text()).into(),
            None => Response::error(StatusCode(404), &[]).into(),
        }
    }

    fn about(&self) -> &'static str {
        "`all` as JSON, and its members as a tree"
    }
}

/// Lists the names in an object. Names of objects end with a slash.
fn listing(node: DocumentNode<'_>) -> String {
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
fn signed_document(record: &Record, sheet: &mut RouteBuilder<'_>, guards: &'static [RequestGuard]) -> bool {
    let serves = record.serve.serves(Dialect::AliYun);
    let Some(issuer) = sheet.issuer().filter(|issuer| issuer.signs_documents() && serves).cloned() else {
        return false;
    };
    let text: Bytes = identity_document(record).to_string().into();
    let listings = [("/latest/dynamic", "instance-identity/"), (IDENTITY_DIRECTORY, "document\npkcs7")];
    for (path, listing) in listings {
        let response = sheet.found(TEXT, listing);
        sheet.guarded(path, guards, response);
    }
    let response = sheet.found(TEXT, text.clone());
    sheet.guarded(format!("{IDENTITY_DIRECTORY}/document"), guards, response);
    let guards =
        if record.serve.imdsv2 == Imdsv2::Required { &*REQUIRED_UNPROXIED } else { &*OPTIONAL_UNPROXIED };
    sheet.live(
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
