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

mod akamai;
mod aliyun;
mod azure;
mod bigstep;
mod cloudcix;
mod cloudstack;
mod common;
mod digitalocean;
mod document;
mod ec2;
mod eve;
mod events;
mod gce;
mod hetzner;
mod json;
mod kubevirt;
mod maas;
mod network_config;
mod nocloud;
mod nwcs;
mod openstack;
mod oracle;
mod route_builder;
mod scaleway;
mod tokens;
mod upstream;
mod vultr;
mod yaml;

#[cfg(test)]
mod tests;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use crate::http::Request;
use crate::record::{self, Dialects, Record};
use crate::store::path::Canonical;
use crate::store::{Host, Interner, RequestLimit, Responses, UnrenderedDialects, VmState};
use route_builder::RouteBuilder;
pub use yaml::document as yaml_document;

// What each module states of its dialect, once. `computation_timeout`, the tests of conditions and the book use it.

/// How long a request may wait for its record or its rate limit, unless its [`Mount`] states otherwise: slightly less
/// than most clients wait for an answer.
pub const PATIENCE: Duration = Duration::from_secs(4);

/// A dialect as its module describes it. The table `each_dialect!` adds what other modules need: its names, how it
/// carries user-data and vendor-data, and its SMBIOS stamps.
#[derive(Debug)]
pub struct Description {
    /// Other dialects whose guests read the same tree. A record that lists any of them gets the tree too.
    also_for: &'static [record::Dialect],
    /// Paths that contain all routes of the dialect.
    pub mounts: &'static [Mount],
    /// One remark for the book; may be empty.
    pub remark: &'static str,
    /// Clients that the tests run against the dialect, for the book.
    pub clients: &'static str,
    /// Adds the routes for one record.
    render: fn(&Record, &mut RouteBuilder<'_>),
}

impl Description {
    /// A dialect whose tree only its own guests read.
    const fn new(
        mounts: &'static [Mount],
        clients: &'static str,
        render: fn(&Record, &mut RouteBuilder<'_>),
    ) -> Self {
        Self { also_for: &[], mounts, remark: "", clients, render }
    }

    /// Adds dialects whose guests read the same tree.
    const fn also_for(self, also_for: &'static [record::Dialect]) -> Self {
        Self { also_for, ..self }
    }

    /// Sets the book's remark.
    const fn remark(self, remark: &'static str) -> Self {
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
    const fn open(path: &'static str) -> Self {
        Self { host: Host::Metadata, path, access: AccessCondition::Open, patience: PATIENCE }
    }

    /// Moves the path to another host.
    const fn at(self, host: Host) -> Self {
        Self { host, ..self }
    }

    /// Sets the condition that a request must meet.
    const fn needs(self, access: AccessCondition) -> Self {
        Self { access, ..self }
    }

    /// Sets how long a request may wait.
    const fn waits(self, patience: Duration) -> Self {
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

// The table.

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

/// Returns whether the request asks for a session token of any dialect. Its path is normalised.
#[must_use]
pub fn asks_for_token(host: Host, request: &Request<'_>) -> bool {
    tokens::is_asked_for(host, request)
}

/// Renders all answers for a VM. Paths of dialects not in `serve.dialects` are left out.
#[must_use]
pub fn render(record: &Record, interner: &mut Interner, vm: VmState) -> Responses {
    vm.mailbox.events().note_record(record.instance_id(), &record.events, 0);
    render_dialects(record, interner, vm, served(record))
}

/// Renders the answers of these dialects, and those that every VM has.
fn render_dialects(record: &Record, interner: &mut Interner, vm: VmState, dialects: Dialects) -> Responses {
    let issues = vm.issuer.is_some();
    let has_upstream = vm.upstream.is_some();
    let mut routes = RouteBuilder::new(interner, vm);
    routes.limit(RequestLimit { per_second: record.serve.limits.rps, burst: record.serve.limits.burst });
    match has_upstream {
        true => upstream::render(&mut routes),
        false => common::render_root(record, &mut routes),
    }
    for row in DIALECTS.iter().filter(|row| dialects.contains(row.name())) {
        routes.begin(row.name().as_str());
        (row.dialect.render)(record, &mut routes);
    }
    common::render_reports(&mut routes);
    events::render(&mut routes);
    if issues {
        tokens::render(&mut routes);
    }
    routes.finish()
}

// Dialects that are rendered when their guest first asks for them.
//
// A record is served in twenty dialects, and a guest reads one or two. The others would take thirty of the forty
// kilobytes of a VM, and most of the time that a new record takes. The mounts that the dialects describe tell which
// dialects may answer a path.

/// Returns the dialects that a record serves, each by the first name of its row.
fn served(record: &Record) -> Dialects {
    DIALECTS.iter().filter(|row| row.is_served(record)).map(Row::name).collect()
}

/// Returns the dialects that a guest will ask for first, as far as the record tells: the datasource in its SMBIOS, and
/// what may answer the same paths.
#[must_use]
pub fn expected(record: &Record) -> Dialects {
    let stamped = record.serve.smbios.dialect();
    let is_stamped = |row: &&Row| stamped.is_some_and(|name| row.is_for(name));
    let mounts = DIALECTS.iter().filter(is_stamped).flat_map(|row| row.dialect.mounts);
    mounts.fold(Dialects::NONE, |all, mount| all.or(claims(mount.host, mount.path)))
}

/// Returns the dialects whose routes are not below their mounts, because the record names their path. The path of a
/// request does not tell that they may answer it.
fn unmounted(record: &Record) -> Dialects {
    if maas::is_mounted(record) { Dialects::NONE } else { [record::Dialect::Maas].into_iter().collect() }
}

/// Renders the dialects of `asked`, and those that no request can ask for by its path. [`render_more`] renders the others when a request needs them.
#[must_use]
pub fn render_asked(
    record: &Arc<Record>,
    interner: &mut Interner,
    vm: VmState,
    asked: Dialects,
) -> Responses {
    let served = served(record);
    let rendered = served.and(asked.or(unmounted(record)));
    render_dialects(record, interner, vm, rendered).without(UnrenderedDialects {
        record: Arc::clone(record),
        rendered,
        missing: served.without(rendered),
    })
}

/// Renders the responses again with the dialects of `more`. `None` if all are rendered.
#[must_use]
pub fn render_more(responses: &Responses, interner: &mut Interner, more: Dialects) -> Option<Responses> {
    let known = responses.unrendered()?;
    let vm = responses.vm().clone();
    Some(render_asked(&known.record, interner, vm, known.rendered.or(more)))
}

/// Returns the dialects that are not rendered and may answer a request for this path, which is normalised.
#[must_use]
pub fn missing(responses: &Responses, host: Host, path: &str) -> Dialects {
    let Some(unrendered) = responses.unrendered() else { return Dialects::NONE };
    claims_among(unrendered.missing, host, &Canonical::of(host, path))
}

/// Returns the dialects that may have routes at this path of a route or above it.
fn claims(host: Host, path: &str) -> Dialects {
    claims_among(Dialects::ALL, host, &Canonical::at(path))
}

fn claims_among(dialects: Dialects, host: Host, path: &Canonical<'_>) -> Dialects {
    let likely = dialects.and(likely(host, path.first_segment()));
    if likely.is_empty() {
        return Dialects::NONE;
    }
    let answers = |row: &&Row| {
        likely.contains(row.name())
            && row.mounts_at(host).any(|mount| path.is_in(mount.path.trim_end_matches('/')))
    };
    DIALECTS.iter().filter(answers).map(Row::name).collect()
}

/// Returns whether a dialect that is not rendered has routes at the host.
#[must_use]
pub fn is_missing_at(responses: &Responses, host: Host) -> bool {
    let missing = responses.unrendered().map_or(Dialects::NONE, |unrendered| unrendered.missing);
    DIALECTS.iter().any(|row| missing.contains(row.name()) && row.mounts_at(host).next().is_some())
}

/// The dialects of one host: with routes anywhere below `/`, and by the first segment of their mounts, sorted.
#[derive(Default)]
struct Segments {
    anywhere: Dialects,
    below: Vec<(&'static str, Dialects)>,
}

/// A look-up takes a few comparisons instead of one for each mount.
static SEGMENTS: LazyLock<[Segments; Host::ALL.len()]> = LazyLock::new(|| Host::ALL.map(segments));

fn segments(host: Host) -> Segments {
    let mut all = Segments::default();
    for row in DIALECTS {
        let own: Dialects = [row.name()].into_iter().collect();
        for mount in row.mounts_at(host) {
            match mount.path.split('/').nth(1).unwrap_or("") {
                "" => all.anywhere = all.anywhere.or(own),
                segment => match all.below.iter_mut().find(|(known, _)| *known == segment) {
                    Some((_, dialects)) => *dialects = dialects.or(own),
                    None => all.below.push((segment, own)),
                },
            }
        }
    }
    all.below.sort_by_key(|(segment, _)| *segment);
    all
}

fn likely(host: Host, segment: &str) -> Dialects {
    let Segments { anywhere, below } = &SEGMENTS[host.index()];
    let found = below.binary_search_by_key(&segment, |(known, _)| known);
    found.map_or(*anywhere, |at| anywhere.or(below[at].1))
}
