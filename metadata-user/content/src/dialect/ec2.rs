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

mod disks;
mod iam;
mod signed;
mod tree;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::sync::LazyLock;

use bytes::Bytes;

use super::route_builder::{RouteBuilder, TEXT};
use super::{AccessCondition, Description, Mount, tokens};
use crate::dialect::json::json;
use crate::http::{Response, StatusCode};
use crate::record::values::Cidr;
use crate::record::{self, DateTree, Imdsv2, Nic, Record, is_instance_tag};
use crate::store::{Condition, RequestGuard};
use crate::token::TokenKind;
use tree::Tree;

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/latest").needs(AccessCondition::Imdsv2(TOKEN))],
    "cloud-init 22.4 booted; `DataSourceEc2Local`; botocore; ec2-metadata; ohai; systemd-imdsd",
    render,
)
.also_for(&[record::Dialect::OpenStack, record::Dialect::Eve])
.remark(
    "`1.0` and any date for `latest`, the same below `/ec2`; `PUT /latest/api/token`; signed identity documents \
     with `identity.certificate`",
);

/// Header field with the token.
const TOKEN: &str = "X-aws-ec2-metadata-token";
/// Header field with the requested lifetime of a token, in seconds.
const TTL: &str = "X-aws-ec2-metadata-token-ttl-seconds";
/// Time stated for events that have no time in the record.
const EPOCH: &str = "1970-01-01T00:00:00Z";
/// Image id of a VM without an image.
const NO_IMAGE: &str = "ami-00000000";

static REFUSED: LazyLock<Response> = LazyLock::new(|| Response::error(StatusCode(401), &[]));
static OPTIONAL: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| {
    let condition = Condition::TokenGood { name: TOKEN, kind: TokenKind::Aws };
    [RequestGuard { condition, otherwise: REFUSED.clone() }]
});
static REQUIRED: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| {
    let condition = Condition::TokenNeeded { name: TOKEN, kind: TokenKind::Aws };
    [RequestGuard { condition, otherwise: REFUSED.clone() }]
});

fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    let serve = &record.serve;
    let tokens = serve.serves(record::Dialect::Ec2) && serve.date_tree == DateTree::Ec2;
    let imdsv2 = if tokens { serve.imdsv2 } else { Imdsv2::Off };
    match imdsv2 {
        Imdsv2::Off => tokens::absent(sheet),
        Imdsv2::Optional | Imdsv2::Required => {
            tokens::present(sheet, TokenKind::Aws, TTL, serve.hop_limit.get());
        }
    }
    if serve.date_tree == DateTree::CloudStack {
        // CloudStack's listing, if served, is already added and precedes this one. Without either, guests of OpenStack
        // would get a 404.
        if serve.serves(record::Dialect::OpenStack) || serve.serves(record::Dialect::Eve) {
            sheet.text("/latest/meta-data", "");
        }
        return;
    }
    let guards: &[RequestGuard] = if imdsv2 == Imdsv2::Required { &*REQUIRED } else { &*OPTIONAL };
    let mut tree = Tree::new(sheet, guards);
    identity(record, &mut tree);
    network(record, &mut tree);
    keys(record, &mut tree);
    tags(record, &mut tree);
    disks::render(record, &mut tree);
    iam::render(record, &mut tree);
    document(record, &mut tree);
    if let Some(user_data) = &record.user_data {
        let response = tree.sheet().payload(user_data);
        tree.leaf("/latest/user-data", response);
    }
    tree.finish();
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
/// anew at each boot.
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
    let response = tree.sheet().found(TEXT, bytes.clone());
    tree.leaf("/latest/dynamic/instance-identity/document", response);
    signed::render(record, tree, &bytes);
}
