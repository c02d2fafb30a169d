//! One module per dialect. Each renders a record into the paths and responses of its clouds.
//!
//! A module describes its dialect in a [`Description`] and adds routes to a `RouteBuilder`. Its row in `each_dialect!`
//! registers it. Each dialect of a record is rendered once: in advance if the guest is expected to ask for
//! it, else when the guest asks. Answers that depend on the request (tokens, writes, queries, long polls) come from a
//! [`LiveRoute`](crate::store::LiveRoute) in the same module.

/// The table of dialects. It calls a macro with one row per module:
///
/// `module: Variant "name in records" "Title" user-data vendor-data [SMBIOS stamps];`
///
/// A module with several names has one such part per name, separated by commas. The columns user-data and vendor-data
/// are variants of [`PayloadEncoding`](crate::record::PayloadEncoding). If two dialects serve one path, the earlier row
/// gets it.
macro_rules! each_dialect {
    ($table:ident) => {
        $table! {
            nocloud: NoCloud "nocloud" "NoCloud" Bytes Bytes ["nocloud", "nocloud-net"];
            kubevirt: Kubevirt "kubevirt" "kubevirt-imds" Absent Absent [];
            openstack: OpenStack "openstack" "OpenStack" Bytes InDocument ["openstack"];
            cloudstack:
                CloudStack "cloudstack" "CloudStack" Bytes Absent ["cloudstack"],
                Exoscale "exoscale" "Exoscale" Bytes Absent ["exoscale"];
            ec2: Ec2 "ec2" "EC2" Bytes Absent ["ec2"];
            aliyun: AliYun "aliyun" "AliYun" Bytes Bytes ["aliyun"];
            gce: Gce "gce" "GCE" InDocumentOrBase64 Absent ["gce"];
            azure: Azure "azure" "Azure" Base64 Absent ["azure"];
            digitalocean:
                DigitalOcean "digitalocean" "DigitalOcean" InDocument InDocument ["digitalocean"],
                UpCloud "upcloud" "UpCloud" InDocument InDocument ["upcloud"];
            hetzner: Hetzner "hetzner" "Hetzner" Bytes InDocument ["hetzner"];
            vultr: Vultr "vultr" "Vultr" InDocument InDocument ["vultr"];
            oracle: Oracle "oracle" "Oracle" Base64 Absent ["oracle"];
            akamai: Akamai "akamai" "Akamai" Base64 Absent ["akamai"];
            nwcs: Nwcs "nwcs" "NWCS" InDocument InDocument ["nwcs"];
            bigstep: Bigstep "bigstep" "Bigstep" InDocument InDocument [];
            cloudcix: CloudCix "cloudcix" "CloudCIX" Base64Text Absent ["cloudcix"];
            scaleway: Scaleway "scaleway" "Scaleway" Text Text ["scaleway"];
            maas: Maas "maas" "MAAS" Bytes InDocument [];
            eve: Eve "eve" "EVE" Bytes InDocument [];
        }
    };
}

mod addresses;
mod akamai;
mod aliyun;
mod azure;
mod bigstep;
mod client;
mod cloudcix;
mod cloudstack;
mod core;
mod demand;
mod description;
mod digitalocean;
mod document;
mod document_tree;
mod ec2;
mod eve;
mod gce;
mod hetzner;
mod identity;
mod json;
mod kubevirt;
mod maas;
mod messages;
mod network_v1;
mod nocloud;
mod nocloud_network;
mod nwcs;
mod openstack;
mod oracle;
mod route_builder;
mod scaleway;
mod text;
mod tokens;
mod vultr;
mod yaml;

#[cfg(test)]
mod guest;
#[cfg(test)]
mod tests;

pub use demand::{expected, is_missing_at, missing, render_asked, render_more};
pub use description::{AccessCondition, Description, Mount, PATIENCE};

use std::time::Duration;

use crate::record::{self, Dialects, Record};
use crate::store::{Host, Interner, RequestLimit, Responses, VmState};
use route_builder::RouteBuilder;

/// A row of the table.
struct Row {
    /// The names in records. The first one is the dialect's name in routes.
    names: &'static [record::Dialect],
    dialect: &'static Description,
}

impl Row {
    /// The name that stands for the row in a set of dialects.
    fn name(&self) -> record::Dialect {
        self.names[0]
    }

    fn mounts_at(&self, host: Host) -> impl Iterator<Item = &'static Mount> {
        self.dialect.mounts.iter().filter(move |mount| mount.host == host)
    }

    fn is_served(&self, record: &Record) -> bool {
        self.all_names().any(|name| record.serve.serves(name))
    }

    /// Returns whether guests of the dialect read this tree.
    fn is_for(&self, dialect: record::Dialect) -> bool {
        self.all_names().any(|name| name == dialect)
    }

    fn all_names(&self) -> impl Iterator<Item = record::Dialect> {
        self.names.iter().chain(self.dialect.also_for).copied()
    }
}

/// Defines [`DIALECTS`] from the rows of `each_dialect!`.
macro_rules! registry {
    ($($module:ident: $(
        $variant:ident $name:literal $title:literal $user_data:ident $vendor_data:ident $stamps:tt
    ),+;)+) => {
        static DIALECTS: &[Row] = &[
            $(Row { names: &[$(record::Dialect::$variant),+], dialect: &$module::DIALECT },)+
        ];
    };
}

each_dialect!(registry);

/// Returns every dialect with its names, in the order of the table.
pub fn all() -> impl Iterator<Item = (&'static [record::Dialect], &'static Description)> {
    DIALECTS.iter().map(|row| (row.names, row.dialect))
}

/// Returns how long a request for `path` may wait for its record or its rate limit: slightly less than the clients of
/// the path wait for an answer. `path` is normalised. The time is that of the longest mount that contains the path.
#[must_use]
pub fn computation_timeout(path: &str) -> Duration {
    let mounts = DIALECTS.iter().flat_map(|row| row.dialect.mounts);
    let longest = mounts.filter(|mount| mount.holds(path)).max_by_key(|mount| mount.path.len());
    longest.map_or(PATIENCE, |mount| mount.patience)
}

/// Renders all answers for a VM. Paths of dialects not in `serve.dialects` are left out.
#[must_use]
pub fn render(record: &Record, interner: &mut Interner, vm: VmState) -> Responses {
    render_dialects(record, interner, vm, demand::served(record))
}

/// Renders the answers of these dialects, and those that every VM has.
fn render_dialects(record: &Record, interner: &mut Interner, vm: VmState, dialects: Dialects) -> Responses {
    let issues = vm.issuer.is_some();
    let mut sheet = RouteBuilder::new(interner, vm);
    sheet.limit(RequestLimit { per_second: record.serve.limits.rps, burst: record.serve.limits.burst });
    core::render(record, &mut sheet);
    for row in DIALECTS.iter().filter(|row| dialects.contains(row.name())) {
        sheet.begin(row.name().as_str());
        (row.dialect.render)(record, &mut sheet);
    }
    messages::render(&mut sheet);
    if issues {
        identity::render(&mut sheet);
    }
    sheet.finish()
}
