//! The description of a dialect. Each module states it once. `computation_timeout`, the tests of conditions and the
//! book use it.

use std::time::Duration;

use super::route_builder::RouteBuilder;
use crate::record::{self, Record};
use crate::store::Host;

/// How long a request may wait for its record or its rate limit, unless its [`Mount`] states otherwise: slightly less
/// than most clients wait for an answer.
pub const PATIENCE: Duration = Duration::from_secs(4);

/// A dialect as its module describes it. The table `each_dialect!` adds what other modules need: its names, how it
/// carries user-data and vendor-data, and its SMBIOS stamps.
#[derive(Debug)]
pub struct Description {
    /// Other dialects whose guests read the same tree. A record that lists any of them gets the tree too.
    pub(super) also_for: &'static [record::Dialect],
    /// Paths that contain all routes of the dialect.
    pub mounts: &'static [Mount],
    /// One remark for the book; may be empty.
    pub remark: &'static str,
    /// Clients that the tests run against the dialect, for the book.
    pub clients: &'static str,
    /// Adds the routes for one record.
    pub(super) render: fn(&Record, &mut RouteBuilder<'_>),
}

impl Description {
    /// A dialect whose tree only its own guests read.
    pub(super) const fn new(
        mounts: &'static [Mount],
        clients: &'static str,
        render: fn(&Record, &mut RouteBuilder<'_>),
    ) -> Self {
        Self { also_for: &[], mounts, remark: "", clients, render }
    }

    /// Adds dialects whose guests read the same tree.
    pub(super) const fn also_for(self, also_for: &'static [record::Dialect]) -> Self {
        Self { also_for, ..self }
    }

    /// Sets the book's remark.
    pub(super) const fn remark(self, remark: &'static str) -> Self {
        Self { remark, ..self }
    }
}

/// A path, or a directory and all below it, that belongs to a dialect.
#[derive(Clone, Copy, Debug)]
pub struct Mount {
    /// The address and port.
    pub host: Host,
    /// The path without a trailing slash; `/` for the whole host.
    pub path: &'static str,
    /// Condition that a request must meet.
    pub access: AccessCondition,
    /// How long a request may wait for its record or its rate limit: slightly less than clients wait for an answer.
    pub patience: Duration,
}

impl Mount {
    /// A path at 169.254.169.254 without a condition.
    pub(super) const fn open(path: &'static str) -> Self {
        Self { host: Host::Metadata, path, access: AccessCondition::Open, patience: PATIENCE }
    }

    /// Moves the path to another host.
    pub(super) const fn at(self, host: Host) -> Self {
        Self { host, ..self }
    }

    /// Sets the condition that a request must meet.
    pub(super) const fn needs(self, access: AccessCondition) -> Self {
        Self { access, ..self }
    }

    /// Sets how long a request may wait.
    pub(super) const fn waits(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Returns whether `path` is the mount's path or below it.
    #[must_use]
    pub fn holds(&self, path: &str) -> bool {
        let rest = path.strip_prefix(self.path.trim_end_matches('/'));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

/// Condition that a request must meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessCondition {
    /// No condition: every process of the guest may read the path.
    Open,
    /// A header field with this name and value.
    Field(&'static str, &'static str),
    /// A session token in this header field.
    Token(&'static str),
    /// A session token in this header field if `serve.imdsv2` is `required`.
    Imdsv2(&'static str),
    /// A source port below 1024, which only root can bind.
    LowPort,
    /// An OAuth signature if the record has keys for it.
    Signature,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::{AccessCondition, Mount};
    use crate::dialect::guest::{DialectGuest, full};
    use crate::dialect::{all, computation_timeout};
    use crate::http::Method;
    use crate::store::Host;

    /// A record with the strictest conditions of every dialect.
    fn strict() -> Value {
        let mut record = full();
        record["serve"]["imdsv2"] = json!("required");
        record["credentials"]["maas"] =
            json!({"consumer_key": "consumer", "token_key": "token", "token_secret": "secret"});
        record
    }

    /// The most specific mount that contains a path.
    fn mount(mounts: &'static [Mount], host: Host, path: &str) -> Option<&'static Mount> {
        let holding = mounts.iter().filter(|mount| mount.host == host && mount.holds(path));
        holding.max_by_key(|mount| mount.path.len())
    }

    /// The status of a GET from an unprivileged port.
    fn status(guest: &DialectGuest, host: Host, path: &str, fields: &[(&str, &str)]) -> u16 {
        let (address, port) = host.authority().split_once(':').unwrap_or((host.authority(), "80"));
        let local = (address, port.parse().expect("a port"));
        guest.ask_at(local, Method::Get, path, fields).status().0
    }

    #[test]
    fn every_route_of_a_dialect_is_below_one_of_its_mounts() {
        for record in [full(), strict()] {
            let guest = DialectGuest::of(&record);
            for (names, dialect) in all() {
                let own =
                    guest.responses().routes().filter(|(.., route)| route.dialect() == names[0].as_str());
                for (host, path, _) in own {
                    assert!(
                        mount(dialect.mounts, host, path).is_some(),
                        "{}: {host:?} {path}",
                        names[0].as_str()
                    );
                }
            }
        }
    }

    #[test]
    fn every_mount_has_a_route_and_enforces_its_condition() {
        for (names, dialect) in all() {
            // Serve this dialect alone: another one may answer the same path without the condition.
            let mut record = strict();
            record["serve"]["dialects"] = names.iter().map(|name| name.as_str()).collect();
            let (guest, name) = (DialectGuest::of(&record), names[0].as_str());
            for one in dialect.mounts {
                let routes = guest.responses().routes().filter(|(host, path, route)| {
                    let own = route.dialect() == name && *host == one.host && one.holds(path);
                    own && mount(dialect.mounts, *host, path).is_some_and(|most| most.path == one.path)
                });
                let routes: Vec<_> = routes.map(|(host, path, _)| (host, path.to_owned())).collect();
                let statuses = |fields: &[(&str, &str)]| -> Vec<u16> {
                    routes.iter().map(|(host, path)| status(&guest, *host, path, fields)).collect()
                };
                let plain = statuses(&[]);
                // CloudStack has the tree only with `serve.date_tree: cloudstack`.
                assert!(
                    !plain.is_empty() || (name, one.path) == ("cloudstack", "/latest"),
                    "{name} {}",
                    one.path
                );
                match one.access {
                    AccessCondition::Open => {
                        assert!(!plain.iter().any(|status| matches!(status, 401 | 403)), "{name} {plain:?}")
                    }
                    AccessCondition::Field(field, value) => {
                        assert!(!plain.contains(&200), "{name} {}: {plain:?}", one.path);
                        let with = statuses(&[(field, value)]);
                        assert!(with.contains(&200) || with.contains(&404), "{name} {}: {with:?}", one.path);
                    }
                    AccessCondition::Token(_)
                    | AccessCondition::Imdsv2(_)
                    | AccessCondition::LowPort
                    | AccessCondition::Signature => {
                        assert!(!plain.contains(&200), "{name} {}: {plain:?}", one.path);
                    }
                }
            }
        }
    }

    #[test]
    fn a_mount_contains_its_path_and_all_paths_below_it() {
        let cases = [
            ("/hetzner", "/hetzner", true),
            ("/hetzner", "/hetzner/v1/metadata", true),
            ("/hetzner", "/hetznerx", false),
            ("/metadata/v1", "/metadata/v1.json", false),
            ("/metadata/v1", "/metadata", false),
            ("/", "/", true),
            ("/", "/anything/at/all", true),
        ];
        for (path, asked, held) in cases {
            assert_eq!(Mount::open(path).holds(asked), held, "{path} {asked}");
        }
    }

    #[test]
    fn the_longest_mount_decides_how_long_a_request_may_wait() {
        for (path, milliseconds) in [
            ("/metadata/v1.json", 1_500),
            ("/metadata/v1/id", 4_000),
            ("/hetzner/v1/metadata", 1_500),
            ("/openstack", 8_000),
            ("/openstack/latest/meta_data.json", 8_000),
            ("/latest/meta-data", 4_000),
            ("/", 4_000),
            ("/of/no/dialect", 4_000),
        ] {
            assert_eq!(computation_timeout(path), Duration::from_millis(milliseconds), "{path}");
        }
    }
}
