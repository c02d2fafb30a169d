//! One file per dialect: a record in, paths and responses out.
//!
//! A dialect is a name and a function that adds its routes to a `Sheet`; adding one is a file and a line
//! in `DIALECTS`. Everything is rendered when the record changes, nothing when a guest asks.

mod core;
mod kubevirt;
mod nocloud;
mod nocloud_network;
mod sheet;
mod yaml;

#[cfg(test)]
mod tests;

use crate::record::{self, Record};
use crate::store::{Interner, RequestLimit, Responses};
use sheet::Sheet;

/// A dialect: what a record calls it, and how it adds its routes.
struct Dialect {
    name: record::Dialect,
    render: fn(&Record, &mut Sheet<'_>),
}

/// The dialects, the first to claim a path first.
const DIALECTS: &[Dialect] = &[nocloud::DIALECT, kubevirt::DIALECT];

/// Renders all a VM can be answered. Paths of dialects not in `serve.dialects` are left out.
#[must_use]
pub fn render(record: &Record, interner: &mut Interner) -> Responses {
    let mut sheet = Sheet::new(interner);
    sheet.limit(RequestLimit { per_second: record.serve.limits.rps, burst: record.serve.limits.burst });
    core::render(&mut sheet);
    for dialect in DIALECTS.iter().filter(|dialect| record.serve.serves(dialect.name)) {
        (dialect.render)(record, &mut sheet);
    }
    sheet.finish()
}

/// True when this version renders the dialect.
#[must_use]
pub fn rendered(name: record::Dialect) -> bool {
    DIALECTS.iter().any(|dialect| dialect.name == name)
}
