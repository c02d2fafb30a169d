//! One file per dialect: a record in, paths and responses out.
//!
//! A dialect is a name and a function that adds its routes to a `Sheet`; adding one is a file and a line
//! in `DIALECTS`. Everything is rendered when the record changes; what cannot be (tokens, writes, queries,
//! long-polls) is a [`Live`](crate::store::Live) in the dialect's file.

mod addresses;
mod akamai;
mod aliyun;
mod azure;
mod client;
mod cloudcix;
mod cloudstack;
mod core;
mod digitalocean;
mod document;
mod ec2;
mod eve;
mod gce;
mod hetzner;
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
mod scaleway;
mod sheet;
mod text;
mod tokens;
mod vultr;
mod walk;
mod yaml;

#[cfg(test)]
mod guest;
#[cfg(test)]
mod tests;

use crate::record::{self, Record};
use crate::store::{Interner, RequestLimit, Responses, Vm};
use sheet::Sheet;

/// A dialect: what a record calls it, and how it adds its routes.
struct Dialect {
    /// Served when the record asks for any of these.
    names: &'static [record::Dialect],
    render: fn(&Record, &mut Sheet<'_>),
}

/// The dialects, the first to claim a path first.
const DIALECTS: &[Dialect] = &[
    nocloud::DIALECT,
    kubevirt::DIALECT,
    openstack::DIALECT,
    cloudstack::DIALECT,
    ec2::DIALECT,
    aliyun::DIALECT,
    gce::DIALECT,
    azure::DIALECT,
    digitalocean::DIALECT,
    hetzner::DIALECT,
    vultr::DIALECT,
    oracle::DIALECT,
    akamai::DIALECT,
    nwcs::DIALECT,
    cloudcix::DIALECT,
    scaleway::DIALECT,
    maas::DIALECT,
    eve::DIALECT,
];

/// Renders all a VM can be answered. Paths of dialects not in `serve.dialects` are left out.
#[must_use]
pub fn render(record: &Record, interner: &mut Interner, vm: Vm) -> Responses {
    let mut sheet = Sheet::new(interner, vm);
    sheet.limit(RequestLimit { per_second: record.serve.limits.rps, burst: record.serve.limits.burst });
    core::render(record, &mut sheet);
    for Dialect { names, render } in DIALECTS {
        if names.iter().any(|name| record.serve.serves(*name)) {
            sheet.begin(names[0].as_str());
            render(record, &mut sheet);
        }
    }
    messages::render(&mut sheet);
    sheet.finish()
}
