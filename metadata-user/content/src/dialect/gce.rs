//! Google Compute Engine's metadata server: one tree below `/computeMetadata/v1`, walked per request. Guests can wait
//! for a change of a value, and write a part of the tree.
//!
//! Names have hyphens in paths and camel case in JSON. Below `attributes/`, `guest-attributes/` and `service-accounts/`
//! names are the same in both. Client libraries recognise the cloud only by the header field `Metadata-Flavor:
//! Google`. So every response of this dialect has the field, and so has the response at `/` to requests with it.
//!
//! ```text
//! /computeMetadata/v1/ ─┬─ instance/ ─┬─ attributes/        user-data, ssh-keys, the record's metadata
//!                       │             ├─ guest-attributes/  what the guest wrote
//!                       │             ├─ service-accounts/  e-mail, scopes, tokens
//!                       │             └─ …
//!                       ├─ oslogin/
//!                       └─ project/
//! ```

mod tree;

#[cfg(test)]
mod tests;

use bytes::Bytes;
use serde_json::{Map, Value};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;
use tree::{Etag, NodeShape, TreeNode, TreeView};

use super::common::is_cloud_init;
use super::document::{DocumentNode, JsonDocument};
use super::route_builder::{JSON, RouteBuilder, TEXT};
use super::tokens::issue;
use super::{AccessCondition, Description, Mount};
use crate::dialect::json::json;
use crate::http::{Body, Method, Request, Response, StatusCode};
use crate::identity::{CloudClaims, IssuedToken, SigningRequest, TokenRefusal, VmIssuer};
use crate::mailbox::{AttributeRefused, AttributeValue, Mailbox};
use crate::record;
use crate::record::Record;
use crate::record::identity::Audience;
use crate::record::values::Secret;
use crate::store::{Condition, LiveOutcome, LiveRequest, LiveRoute, Methods, ParkedCall, RequestGuard};

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/computeMetadata").needs(AccessCondition::Field("Metadata-Flavor", "Google"))],
    "`DataSourceGCELocal`; google-auth; ohai; systemd-imdsd",
    render,
)
.remark("`recursive`, `alt`, `wait_for_change`, guest attributes");

/// Content type of plain values, as on the real server.
const PLAIN: &str = "application/text";
/// Maximum length of a subtree's JSON that is hashed per request, in bytes. Longer ones are hashed once.
const HASHED_ONCE: usize = 4 << 10;
/// How long a request waits for a change by default.
const WAIT_DEFAULT: Duration = Duration::from_secs(60);
/// Maximum time a request may wait for a change.
const WAIT_MOST: Duration = Duration::from_secs(3_600);

/// All methods. Refusals need the flavour, so this module answers them and not the router.
static METHODS: [Method; 8] = [
    Method::Get,
    Method::Head,
    Method::Put,
    Method::Delete,
    Method::Post,
    Method::Patch,
    Method::Options,
    Method::Other,
];

/// The request has `Metadata-Flavor: Google` or the older field for it.
const FLAVOUR: Condition = Condition::HeaderIsOneOf(FLAVOUR_FIELDS);
const FLAVOUR_FIELDS: &[(&str, &str)] =
    &[("Metadata-Flavor", "Google"), ("X-Google-Metadata-Request", "True")];

/// Returns whether the request satisfies [`FLAVOUR`].
pub(super) fn has_flavour(request: &Request<'_>) -> bool {
    FLAVOUR_FIELDS.iter().any(|(name, value)| {
        request.headers.get(name).is_some_and(|found| found.eq_ignore_ascii_case(value.as_bytes()))
    })
}

static GUARDS: LazyLock<[RequestGuard; 2]> = LazyLock::new(|| {
    let missing = "Missing required header \"Metadata-Flavor\": \"Google\"\n";
    [
        RequestGuard {
            condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
            otherwise: refusal(StatusCode(403), &[]),
        },
        RequestGuard { condition: FLAVOUR, otherwise: flavoured(StatusCode(403), TEXT, &[], missing) },
    ]
});

/// Builds a response of this server.
fn flavoured(status: StatusCode, kind: &str, fields: &[(&str, &str)], body: impl Into<Body>) -> Response {
    let own = [("Metadata-Flavor", "Google"), ("Server", "Metadata Server for VM")];
    let fields: Vec<_> = own.iter().chain(fields).copied().collect();
    Response::new(status, Some(kind), &fields, body)
}

/// The answer of the real server while no maintenance is planned. Google's agents recognise it by its text, and treat
/// any other 503 as an error.
static NO_MAINTENANCE: LazyLock<Response> = LazyLock::new(|| {
    let text = r#"{ "error": "no notifications have been received yet, try again later" }"#;
    flavoured(StatusCode(503), JSON, &[], text)
});

/// Builds a short text error.
fn refusal(status: StatusCode, fields: &[(&str, &str)]) -> Response {
    flavoured(status, TEXT, fields, format!("{}\n", status.reason()))
}

fn not_allowed(allowed: &'static [Method]) -> Response {
    refusal(StatusCode(405), &[("Allow", &Methods::of(allowed).to_string())])
}

/// Builds a 200 below `v1`.
fn found(kind: &str, etag: Etag, body: impl Into<Body>) -> Response {
    flavoured(StatusCode(200), kind, &[("ETag", &etag.to_string())], body)
}

pub(super) fn root(routes: &mut RouteBuilder<'_>) -> Response {
    routes.share(flavoured(StatusCode(200), PLAIN, &[], "computeMetadata/\n"))
}

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let server = Server::new(record, routes);
    routes.live_below("/computeMetadata", Methods::of(&METHODS), &*GUARDS, server);
}

/// The metadata server of one VM.
struct Server {
    document: HashedDocument,
    /// The attributes for cloud-init, if they differ.
    for_cloud_init: Option<HashedDocument>,
    /// User-data that is text, unescaped; shared with other dialects.
    user_data: Option<Bytes>,
    /// The source of the user-data has not been read yet.
    unread: bool,
    token: Option<Token>,
    /// Tokens of the node's issuer, for an account that has none of its own.
    issued: Option<GceTokenFormats>,
}

/// A document, and the hashes of its long subtrees.
struct HashedDocument {
    document: JsonDocument,
    /// Ranges of long subtrees in the document, with their hashes once computed.
    long: Box<[(Range<usize>, OnceLock<Etag>)]>,
}

impl HashedDocument {
    fn new(document: JsonDocument) -> Self {
        let mut long = Vec::new();
        find_long(document.root(), &mut long);
        Self { document, long: long.into() }
    }

    /// Returns the hash of a node of the document.
    fn etag(&self, node: DocumentNode<'_>) -> Etag {
        let span = node.span();
        match self.long.iter().find(|(long, _)| *long == span) {
            Some((_, etag)) => *etag.get_or_init(|| Etag::of(&node.json())),
            None => Etag::of(&node.json()),
        }
    }
}

/// The service account's token, and its expiry in Unix seconds.
struct Token {
    text: Secret,
    expires_unix: i64,
}

/// Omits user-data and tokens.
impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

impl Server {
    fn new(record: &Record, routes: &mut RouteBuilder<'_>) -> Self {
        let tree = tree::whole(record, routes.events());
        let document = HashedDocument::new(routes.document(&tree));
        let for_cloud_init =
            tree::for_cloud_init(record).map(|tree| HashedDocument::new(routes.document(&tree)));
        let bytes = record.user_data.as_ref().and_then(record::vm::Payload::bytes);
        let account = record.credentials.service_account.as_ref();
        let token = account.and_then(|account| account.token.as_ref());
        let issuer = account.filter(|account| account.token.is_none()).and(routes.issuer());
        Self {
            issued: issuer.map(|issuer| GceTokenFormats::new(record, issuer)),
            document,
            for_cloud_init,
            user_data: bytes.filter(|o| std::str::from_utf8(o).is_ok()).map(|o| routes.bytes(o)),
            unread: record.user_data.as_ref().is_some_and(|payload| payload.bytes().is_none()),
            token: token.and_then(|token| {
                let expires_unix = token.expires.as_ref()?.unix_seconds();
                Some(Token { text: token.text.clone()?, expires_unix })
            }),
        }
    }

    /// Returns the names in a service account that are not in the document.
    fn computed(&self) -> &'static [&'static str] {
        match (&self.token, &self.issued) {
            (Some(_), _) => &["identity", "token"],
            (None, Some(_)) => &["identity"],
            (None, None) => &[],
        }
    }

    /// Returns the node at a path.
    fn view(&self, path: &[&str]) -> Option<TreeView<'_>> {
        self.view_in(&self.document, path)
    }

    fn view_in<'d>(&'d self, document: &'d HashedDocument, path: &[&str]) -> Option<TreeView<'d>> {
        let mut view = TreeView::root(document.document.root(), self.computed());
        for segment in path {
            view = view.child(segment)?;
        }
        if *path == ["instance", "attributes", "user-data"] {
            view.verbatim = self.user_data.clone();
        }
        Some(view)
    }

    fn read(&self, call: &LiveRequest<'_>, path: &[&str]) -> LiveOutcome {
        let query = Query::parse(call.request.target.query);
        if let ["instance", "guest-attributes", names @ ..] = path {
            return match GuestView::find(&call.vm.mailbox, names) {
                Some(view) => reply(call, &query, &view, view.etag()),
                None => refusal(StatusCode(404), &[]).into(),
            };
        }
        if let ["instance", "service-accounts", _, wanted @ ("token" | "identity")] = *path {
            return match &self.issued {
                Some(identity) if wanted == "identity" && self.view(&path[..3]).is_some() => {
                    identity.answer(call, &query)
                }
                _ => self.credential(call, &path[..3], &query, wanted).into(),
            };
        }
        let in_attributes = path.starts_with(&["instance", "attributes"]);
        let around = matches!(path, [] | ["instance"]) && query.recursive;
        if self.unread && (in_attributes || around) {
            // Clients retry a 503. Without the user-data they would boot unconfigured.
            return refusal(StatusCode(503), &[("Retry-After", "1")]).into();
        }
        let own = self.for_cloud_init.as_ref().filter(|_| in_attributes && is_cloud_init(call.request));
        let document = own.unwrap_or(&self.document);
        match self.view_in(document, path) {
            Some(view) => reply(call, &query, &view, document.etag(view.node)),
            None if path == ["instance", "upcoming-maintenance"] => NO_MAINTENANCE.clone().into(),
            None => refusal(StatusCode(404), &[]).into(),
        }
    }

    /// Returns the account's token. An identity is the same token: the record's author chose its audience.
    ///
    /// An account without a token gets 404, because it never has one. An expired token gets 503, because its source may
    /// get a new one. Google's libraries retry a 503 and give up on a 404.
    fn credential(&self, call: &LiveRequest<'_>, account: &[&str], query: &Query, wanted: &str) -> Response {
        let Some(token) = self.token.as_ref().filter(|_| self.view(account).is_some()) else {
            return refusal(StatusCode(404), &[]);
        };
        let identity = wanted == "identity";
        if identity && query.audience.as_ref().is_none_or(String::is_empty) {
            return NO_AUDIENCE.clone();
        }
        let remaining = token.expires_unix.saturating_sub_unsigned(call.now.unix_seconds);
        if remaining <= 0 {
            return refusal(StatusCode(503), &[("Retry-After", "1")]);
        }
        let text = token.text.expose();
        let etag = Etag::of(&text.to_owned().into());
        if identity {
            return found(PLAIN, etag, text.to_owned());
        }
        let document = json!({ "access_token": text, "expires_in": remaining, "token_type": "Bearer" });
        found(JSON, etag, document.to_string())
    }
}

/// Collects the ranges of subtrees longer than [`HASHED_ONCE`].
fn find_long(node: DocumentNode<'_>, long: &mut Vec<(Range<usize>, OnceLock<Etag>)>) {
    if node.json().len() > HASHED_ONCE {
        long.push((node.span(), OnceLock::new()));
        node.members().into_iter().for_each(|(_, member)| find_long(member, long));
    }
}

/// Answers with the current value, or parks a request that waits for a change of the value.
fn reply<V: TreeNode>(call: &LiveRequest<'_>, query: &Query, view: &V, etag: Etag) -> LiveOutcome {
    let waits = match call.parked {
        _ if !query.wait_for_change => None,
        Some(parked) => {
            let over = parked.state != etag.0 || call.now.mono >= parked.until || parked.wait.is_ended();
            (!over).then(|| parked.clone())
        }
        None if query.last_etag.as_ref().is_some_and(|seen| *seen != etag.to_string()) => None,
        None => {
            let until = call.now.mono + query.timeout.unwrap_or(WAIT_DEFAULT).min(WAIT_MOST);
            Some(ParkedCall { until, has_answer: true, state: etag.0, wait: call.vm.mailbox.wait() })
        }
    };
    match waits {
        Some(parked) => LiveOutcome::Park(parked),
        None => {
            let (kind, body) = query.body(view);
            found(kind, etag, body).into()
        }
    }
}

impl LiveRoute for Server {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let path: Vec<&str> = call.rest.split('/').filter(|segment| !segment.is_empty()).collect();
        let reads = Methods::READ.contain(call.request.method);
        match path.as_slice() {
            ["v1", "instance", "guest-attributes", namespace, key] if !reads => {
                write_attribute(call, namespace, key)
            }
            _ if !reads => not_allowed(&[Method::Get, Method::Head]).into(),
            [] => flavoured(StatusCode(200), PLAIN, &[], "v1/\n").into(),
            ["v1", path @ ..] => self.read(call, path),
            _ => refusal(StatusCode(404), &[]).into(),
        }
    }

    fn about(&self) -> &'static str {
        "the tree, guest attributes and tokens; with wait_for_change, after a change"
    }
}

// Query parameters, and the form of the answer.

/// `alt`: the requested form, if it is not the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AltFormat {
    Json,
    Text,
}

/// Query parameters. Unknown and malformed ones are ignored.
#[derive(Debug, Default)]
struct Query {
    alt: Option<AltFormat>,
    recursive: bool,
    wait_for_change: bool,
    last_etag: Option<String>,
    timeout: Option<Duration>,
    audience: Option<String>,
    /// `format=full`: the token says more of the VM.
    full: bool,
}

impl Query {
    fn parse(text: &str) -> Self {
        let mut query = Self::default();
        for (name, value) in form_urlencoded::parse(text.as_bytes()) {
            // Chef's ohai appends a slash to its URL, and so to this value.
            let yes = value.trim_end_matches('/').eq_ignore_ascii_case("true");
            match &*name {
                "alt" if value.eq_ignore_ascii_case("json") => query.alt = Some(AltFormat::Json),
                "alt" if value.eq_ignore_ascii_case("text") => query.alt = Some(AltFormat::Text),
                "recursive" => query.recursive = yes,
                "wait_for_change" => query.wait_for_change = yes,
                "last_etag" => query.last_etag = Some(value.into_owned()),
                "timeout_sec" => query.timeout = value.parse().ok().map(Duration::from_secs),
                "format" => query.full = value.eq_ignore_ascii_case("full"),
                "audience" => query.audience = Some(value.into_owned()),
                _ => {}
            }
        }
        query
    }

    /// Returns content type and body of a node.
    fn body(&self, view: &impl TreeNode) -> (&'static str, Body) {
        let json = self.alt == Some(AltFormat::Json);
        let whole = self.recursive && self.alt != Some(AltFormat::Text);
        match view.shape() {
            NodeShape::Directory if whole => (JSON, view.json()),
            NodeShape::Directory if self.recursive => (PLAIN, flat(view).into()),
            NodeShape::Directory if json => (JSON, Value::from(names(view)).to_string().into()),
            NodeShape::Directory => (PLAIN, lines(names(view)).into()),
            NodeShape::List if json || whole => (JSON, view.json()),
            NodeShape::Array if self.alt != Some(AltFormat::Text) => (JSON, view.json()),
            NodeShape::List | NodeShape::Array => (PLAIN, lines(items(view)).into()),
            NodeShape::Leaf if json => (JSON, view.json()),
            NodeShape::Leaf => (PLAIN, view.text()),
        }
    }
}

/// Lists a directory. Names of directories end with a slash.
fn names(view: &impl TreeNode) -> Vec<String> {
    let listed = |(name, child)| {
        let slash = if TreeNode::shape(&child) == NodeShape::Directory { "/" } else { "" };
        format!("{name}{slash}")
    };
    let mut names: Vec<String> = view.children().into_iter().map(listed).collect();
    let unlisted = view.computed();
    if !unlisted.is_empty() {
        names.extend(unlisted.iter().map(ToString::to_string));
        names.sort();
    }
    names
}

fn items(view: &impl TreeNode) -> Vec<String> {
    view.children().iter().map(|(_, item)| plain(item)).collect()
}

fn plain(view: &impl TreeNode) -> String {
    String::from_utf8_lossy(&view.text().to_bytes()).into_owned()
}

fn lines(lines: Vec<String>) -> String {
    lines.into_iter().map(|line| line + "\n").collect()
}

/// Writes a whole directory as text, one line per value: path, space, value.
fn flat(view: &impl TreeNode) -> String {
    fn write(view: &impl TreeNode, path: &str, text: &mut String) {
        for (name, child) in view.children() {
            let path = if path.is_empty() { name } else { format!("{path}/{name}") };
            match child.shape() {
                NodeShape::Directory => write(&child, &path, text),
                NodeShape::List | NodeShape::Array => {
                    items(&child).iter().for_each(|item| *text += &format!("{path} {item}\n"))
                }
                NodeShape::Leaf => *text += &format!("{path} {}\n", plain(&child)),
            }
        }
    }
    let mut text = String::new();
    write(view, "", &mut text);
    text
}

// `instance/guest-attributes/<namespace>/<key>`: values the guest writes and reads back.

/// Random number of this run of the agent: the version of the attributes starts at 0 in each run.
static RUN: LazyLock<u64> = LazyLock::new(rand::random);

/// Writes or deletes an attribute.
fn write_attribute(call: &LiveRequest<'_>, namespace: &str, key: &str) -> LiveOutcome {
    let mailbox = &call.vm.mailbox;
    match call.request.method {
        Method::Put => match mailbox.set_attribute(namespace, key, call.request.body) {
            Ok(true) => LiveOutcome::Changed(written(call.request.body)),
            // Nobody waits for it, and each parked request that is looked at again costs time.
            Ok(false) => written(call.request.body).into(),
            Err(AttributeRefused::Name) => refusal(StatusCode(400), &[]).into(),
            Err(AttributeRefused::TooLarge) => refusal(StatusCode(413), &[]).into(),
            Err(AttributeRefused::Full | AttributeRefused::TooMuch) => refusal(StatusCode(409), &[]).into(),
        },
        Method::Delete if mailbox.delete_attribute(namespace, key) => LiveOutcome::Changed(written(b"")),
        Method::Delete => refusal(StatusCode(404), &[]).into(),
        _ => not_allowed(&[Method::Get, Method::Head, Method::Put, Method::Delete]).into(),
    }
}

fn written(bytes: &[u8]) -> Response {
    found(PLAIN, Etag::of(&bytes.to_vec().into()), "")
}

/// All guest attributes, one namespace, or one attribute.
struct GuestView<'a> {
    mailbox: &'a Mailbox,
    at: GuestNode,
}

enum GuestNode {
    All,
    Namespace(String, Vec<String>),
    Attribute(AttributeValue),
}

impl<'a> GuestView<'a> {
    /// Returns the attributes at a path.
    fn find(mailbox: &'a Mailbox, names: &[&str]) -> Option<Self> {
        let at = match names {
            [] => GuestNode::All,
            [namespace] => {
                let mut all = mailbox.attributes().into_iter();
                let (name, keys) = all.find(|(name, _)| name == namespace)?;
                GuestNode::Namespace(name, keys)
            }
            [namespace, key] => GuestNode::Attribute(mailbox.attribute_value(namespace, key)?),
            _ => return None,
        };
        Some(Self { mailbox, at })
    }

    /// Returns the hash of an attribute's value. The ETag of a directory changes with every change of any attribute,
    /// because a directory is too large to hash for each parked request after each write.
    fn etag(&self) -> Etag {
        match &self.at {
            GuestNode::Attribute(value) => Etag(value.hash),
            GuestNode::All | GuestNode::Namespace(..) => {
                let version = RUN.wrapping_add(self.mailbox.attributes_version());
                Etag::of(&version.to_be_bytes().to_vec().into())
            }
        }
    }

    fn value(&self) -> Value {
        match &self.at {
            GuestNode::Attribute(value) => String::from_utf8_lossy(&value.bytes).into(),
            GuestNode::All | GuestNode::Namespace(..) => {
                let members = self.children().into_iter().map(|(name, child)| (name, child.value()));
                members.collect::<Map<String, Value>>().into()
            }
        }
    }
}

impl TreeNode for GuestView<'_> {
    fn shape(&self) -> NodeShape {
        if matches!(self.at, GuestNode::Attribute(_)) { NodeShape::Leaf } else { NodeShape::Directory }
    }

    fn children(&self) -> Vec<(String, Self)> {
        let view = |at| Self { mailbox: self.mailbox, at };
        match &self.at {
            GuestNode::All => {
                let namespace = |(name, keys): (String, Vec<String>)| {
                    (name.clone(), view(GuestNode::Namespace(name, keys)))
                };
                self.mailbox.attributes().into_iter().map(namespace).collect()
            }
            GuestNode::Namespace(namespace, keys) => {
                let attribute = |key: &String| {
                    let value = self.mailbox.attribute_value(namespace, key)?;
                    Some((key.clone(), view(GuestNode::Attribute(value))))
                };
                keys.iter().filter_map(attribute).collect()
            }
            GuestNode::Attribute(_) => Vec::new(),
        }
    }

    fn json(&self) -> Body {
        self.value().to_string().into()
    }

    fn text(&self) -> Body {
        match &self.at {
            GuestNode::Attribute(value) => value.bytes.clone().into(),
            GuestNode::All | GuestNode::Namespace(..) => Body::default(),
        }
    }
}

// `identity`: tokens of the node's issuer in the form of Google's, for a service account without a token of its own.
//
// | Claim | Value | In |
// |---|---|---|
// | `aud` | the parameter `audience` | each |
// | `sub`, `azp` | the VM's subject, as in `/v1/identity/jwt` | each |
// | `email`, `email_verified` | the account's `email`, if the record has it; `true` | `format=full` |
// | `google.compute_engine` | project, zone, and the VM's id and name, as in the tree | `format=full` |
//
// Google puts the account's number into `sub` and `azp`. An account here has no number, and several VMs may have one
// account. Records state neither a time of creation nor licences, so these claims are absent, also with
// `licenses=TRUE`.

static NO_AUDIENCE: LazyLock<Response> =
    LazyLock::new(|| flavoured(StatusCode(400), TEXT, &[], "non-empty audience parameter required\n"));
static BAD_AUDIENCE: LazyLock<Response> = LazyLock::new(|| {
    flavoured(StatusCode(400), TEXT, &[], format!("expected an audience of {}\n", Audience::FORM))
});

/// The forms of one VM's tokens.
struct GceTokenFormats {
    issuer: Arc<VmIssuer>,
    standard: Arc<CloudClaims>,
    full: Arc<CloudClaims>,
}

impl GceTokenFormats {
    fn new(record: &Record, issuer: &Arc<VmIssuer>) -> Self {
        let mut claims = Map::new();
        claims.insert("azp".to_owned(), issuer.subject().into());
        let standard = CloudClaims { name: "google", claims: claims.clone() };
        let account = record.credentials.service_account.as_ref();
        if let Some(email) = account.and_then(|account| account.email.as_ref()) {
            claims.insert("email".to_owned(), email.as_str().into());
            claims.insert("email_verified".to_owned(), true.into());
        }
        claims.insert("google".to_owned(), json!({ "compute_engine": compute_engine(record) }));
        let full = CloudClaims { name: "google_full", claims };
        Self { issuer: Arc::clone(issuer), standard: standard.into(), full: full.into() }
    }

    /// Answers a request for a token, or parks it while the token is signed.
    fn answer(&self, call: &LiveRequest<'_>, query: &Query) -> LiveOutcome {
        let Some(audience) = query.audience.as_deref().filter(|audience| !audience.is_empty()) else {
            return NO_AUDIENCE.clone().into();
        };
        let Some(audience) = Audience::parse(audience) else { return BAD_AUDIENCE.clone().into() };
        let form = if query.full { &self.full } else { &self.standard };
        let wanted = SigningRequest::Token { audience, form: Some(Arc::clone(form)) };
        let issued = |token: IssuedToken| found(PLAIN, Etag::of(&token.text.clone().into()), token.text);
        issue(call, &self.issuer, &wanted, issued, refused)
    }
}

/// Builds a refusal. Google's libraries retry a 429 and a 503.
fn refused(why: TokenRefusal) -> Response {
    match why {
        TokenRefusal::Audience => refusal(StatusCode(403), &[]),
        TokenRefusal::TooMany => refusal(StatusCode(429), &[("Retry-After", "1")]),
        TokenRefusal::Unavailable => refusal(StatusCode(503), &[("Retry-After", "1")]),
    }
}

fn compute_engine(record: &Record) -> Value {
    json!({
        "instance_id": record.numeric_id().to_string(),
        "instance_name": record.vm.name.as_str(),
        "project_id": record.vm.project.id.as_str(),
        "project_number": record.vm.project.number,
        "zone": record.placement.zone.as_str(),
    })
}
