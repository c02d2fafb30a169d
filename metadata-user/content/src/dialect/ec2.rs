//! EC2: the dated tree, with and without session tokens (IMDSv2).
//!
//! Every version has the same tree, so requests for all versions are looked up under `/latest`. cloud-init's crawl is
//! strict (`cloudinit/sources/helpers/ec2.py`): it drops all metadata if a listed name is not 200, and it reads a
//! leaf that ends with a newline as a list. So the tree lists only names that it serves, and no leaf ends with a
//! newline.
//!
//! Guests of OpenStack and EVE crawl `meta-data/` as well, once at first boot and without a token, and lose five
//! seconds on a 404. If the record does not serve `ec2`, they get the same tree without credentials and without a
//! token route. That tree reveals no more than OpenStack's own documents, so `imdsv2` does not apply to it.

mod tree;

#[cfg(test)]
mod tests;

use bytes::Bytes;
use metadata_common::time::Now;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, LazyLock};
use tree::Tree;

use super::events::{imf_fixdate, utc};
use super::route_builder::{RouteBuilder, TEXT, computed};
use super::tokens::{UNPROXIED, signed};
use super::{AccessCondition, Description, Mount, tokens};
use crate::dialect::json::json;
use crate::http::{Response, StatusCode};
use crate::identity::SigningRequest;
use crate::record::event::{AnnouncedEvent, EventKind, EventState};
use crate::record::values::{Cidr, Timestamp};
use crate::record::vm::{Disk, Iam};
use crate::record::{DateTree, Dialect, Imdsv2, Nic, Record, is_instance_tag};
use crate::store::{Methods, RequestGuard};
use crate::token::TokenKind;

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/latest").needs(AccessCondition::Imdsv2(TOKEN))],
    "cloud-init 22.4 booted; `DataSourceEc2Local`; botocore; ec2-metadata; ohai; systemd-imdsd",
    render,
)
.also_for(&[Dialect::OpenStack, Dialect::Eve])
.remark(
    "`1.0` and any date for `latest`, the same below `/ec2`; `PUT /latest/api/token`; signed identity documents \
     with `identity.certificate`",
);

/// Header field with the token.
const TOKEN: &str = TokenKind::Aws.field();
/// Header field with the requested lifetime of a token, in seconds.
const TTL: &str = "X-aws-ec2-metadata-token-ttl-seconds";
/// Time stated for events that have no time in the record.
const EPOCH: &str = "1970-01-01T00:00:00Z";
/// Image id of a VM without an image.
const NO_IMAGE: &str = "ami-00000000";

static OPTIONAL: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| [tokens::optional(TOKEN, TokenKind::Aws)]);
static REQUIRED: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| [tokens::required(TOKEN, TokenKind::Aws)]);
/// The same, including for requests through a proxy.
static OPTIONAL_UNPROXIED: LazyLock<[RequestGuard; 2]> =
    LazyLock::new(|| [UNPROXIED[0].clone(), OPTIONAL[0].clone()]);
static REQUIRED_UNPROXIED: LazyLock<[RequestGuard; 2]> =
    LazyLock::new(|| [UNPROXIED[0].clone(), REQUIRED[0].clone()]);

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let serve = &record.serve;
    let tokens = serve.serves(Dialect::Ec2) && serve.date_tree == DateTree::Ec2;
    let imdsv2 = if tokens { serve.imdsv2 } else { Imdsv2::Off };
    match imdsv2 {
        Imdsv2::Off => tokens::absent(routes),
        Imdsv2::Optional | Imdsv2::Required => {
            tokens::present(routes, TokenKind::Aws, TTL, serve.hop_limit.get());
        }
    }
    if serve.date_tree == DateTree::CloudStack {
        // CloudStack's listing, if served, is already added and precedes this one. Without either, guests of OpenStack
        // would get a 404.
        if serve.serves(Dialect::OpenStack) || serve.serves(Dialect::Eve) {
            routes.text("/latest/meta-data", "");
        }
        return;
    }
    let guards: &[RequestGuard] = if imdsv2 == Imdsv2::Required { &*REQUIRED } else { &*OPTIONAL };
    let mut tree = Tree::new(routes, guards);
    identity(record, &mut tree);
    network(record, &mut tree);
    keys(record, &mut tree);
    tags(record, &mut tree);
    disks(record, &mut tree);
    iam(record, &mut tree);
    document(record, &mut tree);
    events(&mut tree);
    if let Some(user_data) = &record.user_data {
        let response = tree.routes().payload(user_data);
        tree.leaf("/latest/user-data", response);
    }
    tree.finish();
}

/// Adds the paths of events. The two maintenance lists always exist, because aws-node-termination-handler treats a 404
/// there as an error. No listing names them, so cloud-init does not crawl them at each boot. The other paths exist only
/// while there is such an event: to their clients, 404 means that nothing is planned.
/// <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-metadata.html>
fn events(tree: &mut Tree<'_, '_>) {
    let document = tree.routes().events().clone();
    // AWS does not announce live migrations, and aws-node-termination-handler drains its node for any entry here.
    let is_maintenance =
        |known: &&AnnouncedEvent| !matches!(known.event.kind, EventKind::Freeze | EventKind::Preempt);
    let (pending, over): (Vec<_>, Vec<_>) =
        document.events.iter().filter(is_maintenance).partition(|known| known.event.is_pending());
    for (path, events) in [
        ("/latest/meta-data/events/maintenance/history", over),
        ("/latest/meta-data/events/maintenance/scheduled", pending),
    ] {
        let events: Vec<_> = events.into_iter().map(maintenance).collect();
        tree.unlisted(path, Value::from(events).to_string());
    }
    if let Some(known) = document.pending().find(|known| known.event.kind == EventKind::Preempt) {
        let time = utc(&known.time());
        let notice = known.announced.as_ref().map_or_else(|| time.clone(), utc);
        let rebalance = json!({ "noticeTime": notice }).to_string();
        tree.text("/latest/meta-data/events/recommendations/rebalance", rebalance);
        let action = json!({ "action": "terminate", "time": time.clone() }).to_string();
        tree.text("/latest/meta-data/spot/instance-action", action);
        tree.text("/latest/meta-data/spot/termination-time", time);
    }
    let ends = |known: &AnnouncedEvent| {
        known.event.kind == EventKind::Terminate && known.event.state == EventState::Started
    };
    if document.pending().any(ends) {
        tree.text("/latest/meta-data/autoscaling/target-lifecycle-state", "Terminated");
    }
}

/// Returns an event as an element of `scheduled` or `history`.
fn maintenance(known: &AnnouncedEvent) -> Value {
    let event = &known.event;
    let (state, mark) = match event.state {
        EventState::Scheduled | EventState::Started => ("active", ""),
        EventState::Completed => ("completed", "[Completed] "),
        EventState::Cancelled => ("canceled", "[Canceled] "),
    };
    let code = match event.kind {
        EventKind::Freeze | EventKind::Preempt => "system-maintenance",
        EventKind::Reboot => "system-reboot",
        EventKind::Redeploy => "instance-stop",
        EventKind::Terminate => "instance-retirement",
    };
    // `21 Jan 2019 09:00:43 GMT`: HTTP's form without the day of the week.
    let time = imf_fixdate(&known.time()).split_off("Mon, ".len());
    json!({
        "Code": code,
        "Description": format!("{mark}{}", event.description()),
        "EventId": event.id.as_str(),
        "NotAfter": time.clone(),
        "NotBefore": time,
        "State": state,
    })
}

/// Adds identity and placement, which every VM has.
fn identity(record: &Record, tree: &mut Tree<'_, '_>) {
    let fqdn = record.hostname.fqdn();
    tree.text("/latest/meta-data/ami-id", record.ami_id().unwrap_or_else(|| NO_IMAGE.to_owned()));
    tree.text("/latest/meta-data/ami-launch-index", record.vm.launch_index.to_string());
    tree.text("/latest/meta-data/ami-manifest-path", "(unknown)");
    tree.text("/latest/meta-data/hostname", fqdn.as_str());
    tree.text("/latest/meta-data/instance-action", "none");
    tree.text("/latest/meta-data/instance-id", record.ec2_id());
    tree.text("/latest/meta-data/instance-life-cycle", "on-demand");
    tree.text("/latest/meta-data/instance-type", record.instance_type());
    tree.text("/latest/meta-data/local-hostname", fqdn);
    tree.text("/latest/meta-data/placement/availability-zone", record.placement.zone.as_str());
    tree.text("/latest/meta-data/placement/region", record.placement.region.as_str());
    tree.text("/latest/meta-data/reservation-id", record.reservation_id());
    tree.text("/latest/meta-data/security-groups", "default");
    tree.text("/latest/meta-data/services/domain", "amazonaws.com");
    tree.text("/latest/meta-data/services/partition", "aws");
}

/// Adds the addresses of the first NIC, and a directory per physical NIC, named by its MAC.
fn network(record: &Record, tree: &mut Tree<'_, '_>) {
    if let Some(first) = record.network.nics.first() {
        if let Some(cidr) = first.ipv4().next() {
            tree.text("/latest/meta-data/local-ipv4", cidr.address.to_string());
        }
        if let Some(cidr) = first.ipv6().next() {
            tree.text("/latest/meta-data/ipv6", cidr.address.to_string());
        }
        if let Some(public) = first.public_ipv4().next() {
            tree.text("/latest/meta-data/public-hostname", record.hostname.fqdn());
            tree.text("/latest/meta-data/public-ipv4", public.to_string());
        }
    }
    let physical = record.network.nics.iter().filter(|nic| nic.is_physical());
    for (n, nic) in physical.enumerate() {
        let Some(mac) = nic.mac else { continue };
        if n == 0 {
            tree.text("/latest/meta-data/mac", mac.to_string());
        }
        let directory = format!("/latest/meta-data/network/interfaces/macs/{mac}");
        for (name, value) in interface(record, n, nic) {
            tree.text(format!("{directory}/{name}"), value);
        }
        for (public, own) in associations(nic) {
            tree.text(format!("{directory}/ipv4-associations/{public}"), own.join("\n"));
        }
    }
}

/// Returns the leaves of one NIC. Without `vpc-id`, cloud-init treats the VM as EC2 Classic and renders its network
/// again at each boot.
fn interface(record: &Record, number: usize, nic: &Nic) -> Vec<(&'static str, String)> {
    let lines = |values: Vec<String>| (!values.is_empty()).then(|| values.join("\n"));
    let addresses =
        |cidrs: &mut dyn Iterator<Item = Cidr>| lines(cidrs.map(|cidr| cidr.address.to_string()).collect());
    let networks = |cidrs: &mut dyn Iterator<Item = Cidr>| {
        let mut seen = HashSet::new();
        let networks = cidrs.map(|cidr| cidr.network().to_string());
        networks.filter(|network| seen.insert(network.clone())).collect::<Vec<_>>()
    };
    // The record knows of its project's network only what the VM has addresses in.
    let nics = || record.network.nics.iter();
    let (vpc4, vpc6) = (networks(&mut nics().flat_map(Nic::ipv4)), networks(&mut nics().flat_map(Nic::ipv6)));
    let values = [
        ("device-number", Some(number.to_string())),
        ("interface-id", nic.eni_id()),
        ("ipv6s", addresses(&mut nic.ipv6())),
        ("local-hostname", Some(record.hostname.fqdn())),
        ("local-ipv4s", addresses(&mut nic.ipv4())),
        ("mac", nic.mac.map(|mac| mac.to_string())),
        ("owner-id", Some(record.vm.project.account.to_string())),
        ("public-ipv4s", lines(nic.public_ipv4().map(|ip| ip.to_string()).collect())),
        // As on EC2, a network has one group that is named `default`. The CNI plugin for VPCs requires the id.
        ("security-group-ids", Some(record.vpc_id().replacen("vpc-", "sg-", 1))),
        ("security-groups", Some("default".to_owned())),
        ("subnet-id", nic.subnet_id()),
        ("subnet-ipv4-cidr-block", nic.ipv4().next().map(|cidr| cidr.network().to_string())),
        ("subnet-ipv6-cidr-blocks", lines(networks(&mut nic.ipv6()))),
        ("vpc-id", Some(record.vpc_id())),
        ("vpc-ipv4-cidr-block", vpc4.first().cloned()),
        ("vpc-ipv4-cidr-blocks", lines(vpc4)),
        ("vpc-ipv6-cidr-blocks", lines(vpc6)),
    ];
    values.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Returns the NIC's own addresses by the public address that is translated to them.
fn associations(nic: &Nic) -> BTreeMap<IpAddr, Vec<String>> {
    let mut associations: BTreeMap<IpAddr, Vec<String>> = BTreeMap::new();
    for entry in &nic.addresses {
        if let (Some(public), Some(own)) = (entry.public, entry.address)
            && public.0.is_ipv4()
            && own.address.is_ipv4()
        {
            associations.entry(public.0).or_default().push(own.address.to_string());
        }
    }
    associations
}

/// Adds the keys. `public-keys/` lists `0=name` for the leaf `0/openssh-key`.
fn keys(record: &Record, tree: &mut Tree<'_, '_>) {
    if record.ssh_keys.is_empty() {
        return;
    }
    let mut listing = Vec::new();
    for (n, key) in record.ssh_keys.iter().enumerate() {
        // A final slash would make the name a directory, and Unicode has several line breaks.
        let breaks = |c: char| c == '/' || (c.is_whitespace() && c != ' ');
        listing.push(format!("{n}={}", key.name.as_str().replace(breaks, "_")));
        tree.text(format!("/latest/meta-data/public-keys/{n}/openssh-key"), key.key.as_str());
    }
    tree.directory("/latest/meta-data/public-keys", tree.guards(), listing.join("\n"));
}

fn tags(record: &Record, tree: &mut Tree<'_, '_>) {
    for (key, value) in record.metadata.0.iter().filter(|(key, value)| is_instance_tag(key, value)) {
        tree.text(format!("/latest/meta-data/tags/instance/{key}"), value.as_str());
    }
}

/// Adds the identity document, from which cloud-init reads the region, and its signed forms.
fn document(record: &Record, tree: &mut Tree<'_, '_>) {
    let mut document = json!({
        "accountId": record.vm.project.account.as_str(),
        "architecture": record.arch(),
        "availabilityZone": record.placement.zone.as_str(),
        "billingProducts": null,
        "imageId": record.ami_id().unwrap_or_else(|| NO_IMAGE.to_owned()),
        "instanceId": record.ec2_id(),
        "instanceType": record.instance_type(),
        "kernelId": null,
        "pendingTime": EPOCH,
        "ramdiskId": null,
        "region": record.placement.region.as_str(),
        "version": "2017-09-30",
    });
    let first = record.network.nics.first();
    if let Some(IpAddr::V4(address)) = first.and_then(|nic| nic.ipv4().next()).map(|cidr| cidr.address) {
        document["privateIp"] = address.to_string().into();
    }
    let bytes = Bytes::from(document.to_string());
    let response = tree.routes().found(TEXT, bytes.clone());
    tree.leaf("/latest/dynamic/instance-identity/document", response);
    signed_documents(record, tree, &bytes);
}

// `block-device-mapping/`: the names that the guest's kernel gives the record's disks.

/// Root disk of a VM whose record lists none.
const ROOT_DISK: &str = "/dev/vda";

/// Adds `ami` and `root` for the first disk, `ebs1`, `ebs2`, … for the others. Adds no `ephemeral0`, because cloud-init
/// would mount it.
fn disks(record: &Record, tree: &mut Tree<'_, '_>) {
    let mut names = device_names(&record.disks).into_iter();
    let root = names.next().unwrap_or_else(|| ROOT_DISK.to_owned());
    tree.text("/latest/meta-data/block-device-mapping/ami", root.as_str());
    tree.text("/latest/meta-data/block-device-mapping/root", root);
    for (n, name) in names.enumerate() {
        tree.text(format!("/latest/meta-data/block-device-mapping/ebs{}", n + 1), name);
    }
}

/// Returns the device names of disks, assuming that the kernel finds them in the record's order.
fn device_names(disks: &[Disk]) -> Vec<String> {
    let mut found = BTreeMap::<&str, usize>::new();
    let disks = disks.iter().filter(|disk| disk.kind.as_str() == "disk");
    disks
        .map(|disk| {
            let prefix = match disk.bus.as_str() {
                "scsi" | "sata" | "ide" | "usb" => "sd",
                "xen" => "xvd",
                "nvme" => "nvme",
                _ => "vd",
            };
            let number = found.entry(prefix).or_default();
            *number += 1;
            match prefix {
                "nvme" => format!("/dev/nvme{}n1", *number - 1),
                _ => format!("/dev/{prefix}{}", letters(*number)),
            }
        })
        .collect()
}

/// Returns the letters of a number: 1 is `a`, 26 `z`, 27 `aa`.
fn letters(mut number: usize) -> String {
    let mut letters = Vec::new();
    while number > 0 {
        letters.push(b'a' + u8::try_from((number - 1) % 26).unwrap_or(0));
        number = (number - 1) / 26;
    }
    letters.iter().rev().map(|letter| char::from(*letter)).collect()
}

// IAM role and credentials of a VM.

const CREDENTIALS: &str = "/latest/meta-data/iam/security-credentials";
/// Stated lifetime of credentials without an expiry, in seconds; the same as AWS's. Clients then refresh them.
const LASTING_SECONDS: i64 = 6 * 3_600;

/// Returns the guards of what must not reach a proxy.
fn credential_guards(needs_token: bool) -> &'static [RequestGuard] {
    if needs_token { &*REQUIRED_UNPROXIED } else { &*OPTIONAL_UNPROXIED }
}

/// Adds `iam/` if the record serves EC2.
///
/// If credentials need a token and tokens are off, requests for them get 401 and `iam/` does not list them.
fn iam(record: &Record, tree: &mut Tree<'_, '_>) {
    let serve = &record.serve;
    let Some(iam) = record.credentials.iam.as_ref().filter(|_| serve.serves(Dialect::Ec2)) else { return };
    let open = serve.imdsv1_credentials && serve.imdsv2 != Imdsv2::Required;
    let guards = credential_guards(!open);
    tree.text("/latest/meta-data/iam/info", info(record, iam).to_string());
    if open || serve.imdsv2 != Imdsv2::Off {
        tree.directory(CREDENTIALS, guards, iam.role.to_string());
    } else {
        let listing = tree.routes().found(TEXT, iam.role.to_string());
        tree.routes().guarded(CREDENTIALS, guards, listing);
    }
    let path = format!("{CREDENTIALS}/{}", iam.role);
    let routes = tree.routes();
    match credentials(iam) {
        None => {
            let response = routes.unread();
            routes.guarded(path, guards, response);
        }
        Some(document) if document.contains_key("Expiration") => {
            let response = routes.found(TEXT, Value::from(document).to_string());
            routes.guarded(path, guards, response);
        }
        Some(document) => {
            // Clients require an expiry, so each answer states a time six hours ahead.
            let credentials = computed("credentials with an expiry six hours from now", move |call| {
                let mut document = document.clone();
                document.insert("Expiration".into(), six_hours_later(call.now).into());
                Response::new(StatusCode(200), Some(TEXT), &[], Value::from(document).to_string())
            });
            routes.live(path, Methods::READ, guards, credentials);
        }
    }
}

fn info(record: &Record, iam: &Iam) -> Value {
    let account = &record.vm.project.account;
    json!({
        "Code": "Success",
        "InstanceProfileArn": format!("arn:aws:iam::{account}:instance-profile/{}", iam.role),
        "InstanceProfileId": record.instance_profile_id(iam),
        "LastUpdated": iam.updated.as_ref().map_or(EPOCH, |time| time.as_str()),
    })
}

/// Returns the document of a role; `None` while its source cannot be read. The answer is then 503, which AWS clients
/// retry a few times before they continue without credentials. Crawlers do not request it.
fn credentials(iam: &Iam) -> Option<Map<String, Value>> {
    let (id, secret) = (iam.access_key_id.as_ref()?, iam.secret_access_key.as_ref()?);
    let mut document = Map::new();
    let mut own = |key: &str, value: &str| document.insert(key.to_owned(), value.into());
    own("AccessKeyId", id.as_str());
    own("Code", "Success");
    own("LastUpdated", iam.updated.as_ref().map_or(EPOCH, |time| time.as_str()));
    own("SecretAccessKey", secret.expose());
    own("Token", iam.session_token.as_ref().map_or("", |token| token.expose()));
    own("Type", "AWS-HMAC");
    if let Some(expires) = &iam.expires {
        own("Expiration", expires.as_str());
    }
    Some(document)
}

fn six_hours_later(now: Now) -> String {
    let seconds = i64::try_from(now.unix_seconds).unwrap_or(0).saturating_add(LASTING_SECONDS);
    Timestamp::at(seconds).map_or_else(|| EPOCH.to_owned(), |time| time.as_str().to_owned())
}

// `signature`, `pkcs7` and `rsa2048`: the identity document as the operator's certificate signs it.
//
// `signature` is over the bytes of `document`. The other two have the document within: both are the same, RSA with
// SHA-256, while AWS's `pkcs7` is DSA. They are base64 in lines as PEM has them, without PEM's first and last line.
//
// They prove to others who the VM is, so they do not leave the guest's first hop and are refused through a proxy. A
// record that requires session tokens requires them here too. The three exist only on a node with a certificate, and
// only for records that serve EC2. cloud-init reads each listed name once at boot.

/// Adds the signed forms of the document.
fn signed_documents(record: &Record, tree: &mut Tree<'_, '_>, document: &Bytes) {
    let serve = &record.serve;
    let issuer =
        tree.routes().issuer().filter(|issuer| issuer.signs_documents() && serve.serves(Dialect::Ec2));
    let Some(issuer) = issuer.cloned() else { return };
    let guards = credential_guards(serve.imdsv2 == Imdsv2::Required);
    for (path, wanted) in [
        ("/latest/dynamic/instance-identity/pkcs7", SigningRequest::Envelope(document.clone())),
        ("/latest/dynamic/instance-identity/rsa2048", SigningRequest::Envelope(document.clone())),
        ("/latest/dynamic/instance-identity/signature", SigningRequest::Signature(document.clone())),
    ] {
        let issuer = Arc::clone(&issuer);
        let about = "the identity document, signed by the operator's certificate";
        tree.live(path, guards, computed(about, move |call| signed(call, &issuer, &wanted)));
    }
}
