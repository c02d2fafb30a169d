//! Maps the address and path of a request to the host and path under which routes are stored.
//!
//! The address decides before the path, because several clouds use one path for different things on different
//! addresses. A tree that exists once per version is stored once, under `latest`.

use metadata_common::addresses;
use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use super::{Datasource, LiveOutcome, LiveRequest, LiveRoute, RequestGuard};
use crate::http::{Headers, Method, Response};
use crate::record::Dialects;

/// Versions of OpenStack's tree, newest last (nova, `api/metadata/base.py`). All serve the same documents.
pub const OPENSTACK_VERSIONS: [&str; 10] = [
    "2012-08-10",
    "2013-04-04",
    "2013-10-17",
    "2015-10-15",
    "2016-06-30",
    "2016-10-06",
    "2017-02-22",
    "2018-08-27",
    "2020-10-14",
    "2025-04-04",
];

/// TCP port of CloudStack's password server.
pub const PASSWORD_PORT: u16 = 8080;
/// TCP port on the wireserver's address where WALinuxAgent expects the host plug-in (`hostplugin.py`).
pub const HOST_PLUGIN_PORT: u16 = 32_526;

/// A virtual host, selected by address and port. Each host has its own routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Host {
    /// 169.254.169.254, its IPv6 equivalents, and every address without a host of its own.
    #[default]
    Metadata,
    /// 168.63.129.16, Azure's wireserver.
    Wireserver,
    /// 169.254.42.42 and fd00:42::42.
    Scaleway,
    /// 100.100.100.200.
    AliYun,
    /// Port 8080 of any address: the password server of CloudStack and Exoscale.
    Password,
    /// 168.63.129.16 port 32526: the host plug-in of Azure's agent.
    HostPlugin,
}

impl Host {
    /// All hosts.
    pub const ALL: [Self; 6] =
        [Self::Metadata, Self::Wireserver, Self::Scaleway, Self::AliYun, Self::Password, Self::HostPlugin];

    /// Returns the host at an address and port.
    #[must_use]
    pub fn at((address, port): (IpAddr, u16)) -> Self {
        match address {
            _ if port == PASSWORD_PORT => Self::Password,
            IpAddr::V4(addresses::AZURE_WIRESERVER) if port == HOST_PLUGIN_PORT => Self::HostPlugin,
            IpAddr::V4(addresses::AZURE_WIRESERVER) => Self::Wireserver,
            IpAddr::V4(addresses::ALIYUN) => Self::AliYun,
            IpAddr::V4(addresses::SCALEWAY) | IpAddr::V6(addresses::SCALEWAY_V6) => Self::Scaleway,
            _ => Self::Metadata,
        }
    }

    /// Returns the authority of URLs for the host.
    #[must_use]
    pub fn authority(self) -> &'static str {
        match self {
            Self::Metadata => "169.254.169.254",
            Self::Wireserver => "168.63.129.16",
            Self::Scaleway => "169.254.42.42",
            Self::AliYun => "100.100.100.200",
            Self::Password => "169.254.169.254:8080",
            Self::HostPlugin => "168.63.129.16:32526",
        }
    }

    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

/// A path to look up. It has two parts, so that replacing a version copies nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Canonical<'a> {
    head: &'static str,
    tail: &'a str,
}

impl<'a> Canonical<'a> {
    /// Takes the path of a route.
    pub(crate) fn at(path: &'a str) -> Self {
        Self { head: "", tail: path }
    }

    /// Converts a normalised path (`/`, or `/a/b` without a trailing slash).
    #[must_use]
    pub fn of(host: Host, path: &'a str) -> Self {
        let as_it_is = Self { head: "", tail: path };
        match host {
            Host::Metadata => {
                if let Some(rest) = below(path, "/openstack") {
                    return match first(rest) {
                        Some((version, tail)) if OPENSTACK_VERSIONS.contains(&version) => {
                            Self { head: "/openstack/latest", tail }
                        }
                        _ => as_it_is,
                    };
                }
                // Nova and others serve EC2's tree below /ec2 as well.
                dated(below(path, "/ec2").unwrap_or(path))
            }
            Host::AliYun => dated(path),
            Host::Wireserver | Host::Scaleway | Host::Password | Host::HostPlugin => as_it_is,
        }
    }

    /// Returns whether the path equals a route's.
    pub(crate) fn is(&self, route: &str) -> bool {
        route.strip_prefix(self.head).is_some_and(|tail| tail == self.tail)
    }

    /// Returns whether the path is `directory`, which has no trailing slash, or below it.
    pub(crate) fn is_in(&self, directory: &str) -> bool {
        let rest = match directory.strip_prefix(self.head) {
            Some(deeper) => self.tail.strip_prefix(deeper),
            None => self.head.strip_prefix(directory),
        };
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Returns the first segment, without its slashes.
    pub(crate) fn first_segment(&self) -> &str {
        let whole = if self.head.is_empty() { self.tail } else { self.head };
        first(whole).map_or("", |(segment, _)| segment)
    }

    /// Returns the hash by which routes are looked up.
    pub(super) fn hash(&self) -> u32 {
        hash([self.head, self.tail])
    }

    /// Returns the path one level up; `None` at the root.
    pub(super) fn parent(&self) -> Option<Self> {
        match self.tail.rfind('/') {
            Some(0) if self.head.is_empty() && self.tail.len() == 1 => None,
            Some(0) if self.head.is_empty() => Some(Self { head: "", tail: "/" }),
            Some(at) => Some(Self { tail: &self.tail[..at], ..*self }),
            // Above the version of a tree is the root of all of them.
            None if !self.head.is_empty() => Some(Self { head: "", tail: "/" }),
            None => None,
        }
    }

    /// Returns the part of `whole` below `self`. `self` must be `whole` or one of its ancestors.
    pub(super) fn rest_of(&self, whole: &Canonical<'a>) -> &'a str {
        if self.head.is_empty() && self.tail == "/" {
            return if whole.tail == "/" { "" } else { whole.tail };
        }
        &whole.tail[self.tail.len()..]
    }
}

/// Returns the FNV-1a hash of a path in parts. It does not depend on where the path is split.
pub(super) fn hash<'p>(parts: impl IntoIterator<Item = &'p str>) -> u32 {
    let bytes = parts.into_iter().flat_map(str::bytes);
    bytes.fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Maps `/2021-03-23/x`, `/1.0/x` and `/latest/x` to one tree. A version alone maps to the root of the tree.
fn dated(path: &str) -> Canonical<'_> {
    match first(path) {
        Some((version, tail)) if version == "latest" || version == "1.0" || is_date(version) => {
            Canonical { head: "/latest", tail }
        }
        _ if path.is_empty() => Canonical { head: "", tail: "/" },
        _ => Canonical { head: "", tail: path },
    }
}

/// Returns what follows `prefix`; `None` unless `path` is `prefix` or below it.
fn below<'a>(path: &'a str, prefix: &str) -> Option<&'a str> {
    path.strip_prefix(prefix).filter(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Splits `/a/b` into its first segment and the rest.
fn first(path: &str) -> Option<(&str, &str)> {
    let path = path.strip_prefix('/')?;
    Some(path.split_at(path.find('/').unwrap_or(path.len())))
}

/// Returns whether a segment has the form `YYYY-MM-DD`, with any digits. EC2's clients use many dates as versions.
fn is_date(segment: &str) -> bool {
    segment.len() == 10
        && segment.bytes().enumerate().all(|(at, byte)| match at {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        })
}

// A route: the answer to the requests of one path.

/// Methods that a route answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Methods([Option<Method>; Self::MOST]);

impl Methods {
    /// Maximum number of methods of a route: all variants of [`Method`].
    pub const MOST: usize = 8;

    /// GET and HEAD.
    pub const READ: Self = Self::of(&[Method::Get, Method::Head]);

    /// Builds a set of at most [`MOST`](Self::MOST) methods, in the order of `Allow`. List HEAD along with GET.
    ///
    /// # Panics
    /// Panics if there are more than [`MOST`](Self::MOST).
    #[must_use]
    pub const fn of(methods: &'static [Method]) -> Self {
        let mut all = [None; Self::MOST];
        let mut n = 0;
        while n < methods.len() {
            all[n] = Some(methods[n]);
            n += 1;
        }
        Self(all)
    }

    /// Returns each method in order.
    pub fn iter(self) -> impl Iterator<Item = Method> {
        self.0.into_iter().flatten()
    }

    /// Returns whether the set contains the method.
    #[must_use]
    pub fn contain(self, method: Method) -> bool {
        self.0.contains(&Some(method))
    }
}

impl std::fmt::Display for Methods {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.contain(Method::Other) {
            return f.write_str("any method");
        }
        for (n, method) in self.iter().enumerate() {
            write!(f, "{}{}", if n == 0 { "" } else { ", " }, method.as_str())?;
        }
        Ok(())
    }
}

/// Source of a route's answer.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// Rendered when the record is published.
    Fixed(Response),
    /// Computed per request.
    Live(Arc<dyn LiveRoute>),
}

/// Answers the requests of one path.
#[derive(Clone, Debug)]
pub struct Route {
    endpoint: Endpoint,
    /// Shared: a VM has about a hundred routes, and nearly all VMs of a node have the same terms.
    pub(super) terms: Arc<RouteTerms>,
}

/// Path of a route, and the requests it answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RouteTerms {
    path: Cow<'static, str>,
    /// Hash of the path. It also serves as the hash of the terms, because few paths have several terms.
    hash: u32,
    dialect: &'static str,
    datasource: Datasource,
    /// The dialects that may have routes at the path or above it.
    claims: Dialects,
    guards: RequestGuards,
    header: Option<&'static str>,
    methods: Methods,
    below: bool,
}

impl std::hash::Hash for RouteTerms {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write_u32(self.hash);
    }
}

/// Guards. Two lists are equal if they have one address, because each list is defined once.
#[derive(Clone, Copy, Debug)]
struct RequestGuards(&'static [RequestGuard]);

impl PartialEq for RequestGuards {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for RequestGuards {}

impl Route {
    /// Creates a route of a dialect for GET and HEAD, without conditions.
    #[must_use]
    pub fn new(dialect: &'static str, endpoint: Endpoint) -> Self {
        Self::of(dialect, Datasource::named(dialect), endpoint)
    }

    /// Like [`new`](Self::new), for a caller that already knows the dialect's number.
    pub(crate) fn of(dialect: &'static str, datasource: Datasource, endpoint: Endpoint) -> Self {
        let terms = RouteTerms {
            path: Cow::Borrowed("/"),
            hash: hash(["/"]),
            dialect,
            datasource,
            claims: Dialects::NONE,
            guards: RequestGuards(&[]),
            header: None,
            methods: Methods::READ,
            below: false,
        };
        Self { endpoint, terms: Arc::new(terms) }
    }

    /// Sets the route's path, which must be normalised.
    #[must_use]
    pub(crate) fn at(self, path: impl Into<Cow<'static, str>>) -> Self {
        let mut path = path.into();
        if let Cow::Owned(path) = &mut path {
            path.shrink_to_fit();
        }
        self.on(|terms| (terms.hash, terms.path) = (hash([path.as_ref()]), path))
    }

    pub(super) fn path(&self) -> &str {
        &self.terms.path
    }

    pub(super) fn hash(&self) -> u32 {
        self.terms.hash
    }

    fn on(mut self, change: impl FnOnce(&mut RouteTerms)) -> Self {
        change(Arc::make_mut(&mut self.terms));
        self
    }

    /// Sets the dialects that may have routes at the path or above it.
    #[must_use]
    pub(crate) fn claimed_by(self, dialects: Dialects) -> Self {
        self.on(|terms| terms.claims = dialects)
    }

    /// Sets the conditions. The first one that fails determines the answer.
    #[must_use]
    pub fn guarded(self, guards: &'static [RequestGuard]) -> Self {
        self.on(|terms| terms.guards = RequestGuards(guards))
    }

    /// Sets the methods.
    #[must_use]
    pub fn methods(self, methods: Methods) -> Self {
        self.on(|terms| terms.methods = methods)
    }

    /// Limits the route to requests with this header field. It then precedes routes of the path that need no field.
    #[must_use]
    pub fn when(self, header: &'static str) -> Self {
        self.on(|terms| terms.header = Some(header))
    }

    /// Extends the route to all paths below its own.
    #[must_use]
    pub fn and_below(self) -> Self {
        self.on(|terms| terms.below = true)
    }

    /// Returns the dialect's name.
    #[must_use]
    pub fn dialect(&self) -> &'static str {
        self.terms.dialect
    }

    /// Returns the dialect's number.
    pub(super) fn datasource(&self) -> Datasource {
        self.terms.datasource
    }

    /// Returns the dialects that may have routes at the path or above it.
    pub(super) fn claims(&self) -> Dialects {
        self.terms.claims
    }

    /// Returns the source of the answer.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the conditions in order.
    #[must_use]
    pub fn guards(&self) -> &'static [RequestGuard] {
        self.terms.guards.0
    }

    /// Returns the methods that the route answers.
    #[must_use]
    pub fn allowed(&self) -> Methods {
        self.terms.methods
    }

    /// Returns the header field that requests of this route must have; `None` if any request matches.
    #[must_use]
    pub fn header(&self) -> Option<&'static str> {
        self.terms.header
    }

    /// Returns whether the route answers all paths below its own.
    #[must_use]
    pub fn takes_below(&self) -> bool {
        self.terms.below
    }

    /// Returns whether the route matches these headers; ignores the method.
    pub(super) fn is_for(&self, headers: &Headers<'_>) -> bool {
        self.terms.header.is_none_or(|header| headers.contains(header))
    }

    /// Returns whether this route answers every request that `other`, at the same path, would answer.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let (own, others) = (&self.terms, &other.terms);
        own.header == others.header
            && (own.below || !others.below)
            && others.methods.iter().all(|method| own.methods.contain(method))
    }

    pub(super) fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        if let Some(guard) = self.guards().iter().find(|guard| !guard.condition.holds(call)) {
            return guard.otherwise.clone().into();
        }
        match &self.endpoint {
            Endpoint::Fixed(response) => response.clone().into(),
            Endpoint::Live(live) => live.answer(call),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Canonical, Host, OPENSTACK_VERSIONS, hash};

    #[test]
    fn all_versions_map_to_one_tree_and_no_other_path_does() {
        for (host, path, canonical) in [
            (Host::Metadata, "/", "/"),
            (Host::Metadata, "/latest", "/latest"),
            (Host::Metadata, "/latest/user-data", "/latest/user-data"),
            (Host::Metadata, "/1.0/user-data", "/latest/user-data"),
            (Host::Metadata, "/2009-04-04", "/latest"),
            (Host::Metadata, "/2009-04-04/meta-data/ami-id", "/latest/meta-data/ami-id"),
            (Host::Metadata, "/2009-4-04/user-data", "/2009-4-04/user-data"),
            (Host::Metadata, "/ec2", "/"),
            (Host::Metadata, "/ec2/2009-04-04/user-data", "/latest/user-data"),
            (Host::Metadata, "/ec2x/latest", "/ec2x/latest"),
            (Host::Metadata, "/openstack", "/openstack"),
            (Host::Metadata, "/openstack/latest/user_data", "/openstack/latest/user_data"),
            (Host::Metadata, "/openstack/2018-08-27/user_data", "/openstack/latest/user_data"),
            (Host::Metadata, "/openstack/2018-08-27", "/openstack/latest"),
            (Host::Metadata, "/openstack/1999-01-01/user_data", "/openstack/1999-01-01/user_data"),
            (Host::AliYun, "/2016-01-01/meta-data/all", "/latest/meta-data/all"),
            (Host::Scaleway, "/2016-01-01", "/2016-01-01"),
            (Host::Password, "/1.0", "/1.0"),
        ] {
            assert!(Canonical::of(host, path).is(canonical), "{path} at {host:?}");
        }
        assert!(OPENSTACK_VERSIONS.is_sorted());
    }

    #[test]
    fn a_path_in_two_parts_equals_its_text_and_has_its_hash() {
        let texts = ["/", "/l", "/latest", "/latest/a", "/latest0", "/latest/meta-data", "/z", "/openstack"];
        for path in ["/2009-04-04/meta-data", "/latest", "/x", "/openstack/latest"] {
            let canonical = Canonical::of(Host::Metadata, path);
            let whole = format!("{}{}", canonical.head, canonical.tail);
            assert_eq!(canonical.hash(), hash([whole.as_str()]), "{whole}");
            for text in texts {
                assert_eq!(canonical.is(text), whole == text, "{whole} and {text}");
            }
        }
    }

    #[test]
    fn each_ancestor_gives_the_rest_of_the_path_below_it() {
        let whole = Canonical::of(Host::Metadata, "/2009-04-04/a/b");
        let mut rests = Vec::new();
        let mut at = Some(whole);
        while let Some(here) = at {
            rests.push(here.rest_of(&whole));
            at = here.parent();
        }
        assert_eq!(rests, ["", "/b", "/a/b", "/a/b"]);
        let whole = Canonical::of(Host::Password, "/1.0/x");
        let up = whole.parent().expect("/1.0");
        let root = up.parent().expect("/");
        assert_eq!((up.rest_of(&whole), root.rest_of(&whole)), ("/x", "/1.0/x"));
        assert_eq!(root.parent(), None);
        assert_eq!(root.rest_of(&root), "");
    }
}
