//! `xdp-imds explain`: prints which dialect answers a request, the answer and the reason.

use anyhow::bail;
use metadata_common::addresses::{self, Connection};
use metadata_common::printable::{Printable, printable_lines};
use metadata_common::time::Now;
use metadata_content::dialect;
use metadata_content::http::target::normalise;
use metadata_content::http::{Headers, Method, Request, Response};
use metadata_content::identity::{Issuer, SigningJob};
use metadata_content::record::RecordLimits;
use metadata_content::store::{
    Endpoint, Host, Interner, LiveOutcome, LiveRequest, LookupExplanation, Responses, Route, VmState,
};
use serde::Serialize;
use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use std::{fmt, io};

use super::{Exit, ExitError, options};
use crate::config::IdentityConfig;

/// Maximum number of bytes printed of a body.
const SHOWN_BYTES: usize = 8 << 10;
/// The name and version of the JSON format. The version increases when a member is removed or changes its meaning.
pub const SCHEMA: &str = "explain/1";

/// The request to explain.
#[derive(Clone)]
pub struct ExplainRequest {
    /// The record file.
    pub record: PathBuf,
    /// Size limits of the record.
    pub limits: RecordLimits,
    /// The issuer of identity tokens; `None` for a node without one.
    pub identity: Option<IdentityConfig>,
    /// The request's method.
    pub method: String,
    /// The request's target: a path, or a whole URL.
    pub target: String,
    /// Header fields, `Name: value`.
    pub fields: Vec<String>,
    /// The body.
    pub body: String,
    /// The destination address; by default the URL's, or 169.254.169.254.
    pub to: Option<IpAddr>,
    /// The destination port; by default the URL's, or 80.
    pub port: Option<u16>,
    /// The guest's source port. One dialect answers only ports below 1024.
    pub source_port: u16,
}

impl fmt::Debug for ExplainRequest {
    /// Leaves out header fields and body, which can hold tokens and passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { record, method, target, .. } = self;
        let mut shown = f.debug_struct("Question");
        shown.field("record", record).field("method", method).field("target", target).finish_non_exhaustive()
    }
}

impl ExplainRequest {
    /// Destination address and port: the option's, the URL's or the default.
    fn local(&self) -> (IpAddr, u16) {
        let authority = self.target.split_once("://").map(|(_, rest)| {
            let authority = rest.split(['/', '?']).next().unwrap_or_default();
            match authority.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()) {
                Some((host, port)) => (host, port.parse().ok()),
                None => (authority, None),
            }
        });
        let named = authority.and_then(|(host, _)| {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            host.split('%').next().unwrap_or(host).parse().ok()
        });
        let address = self.to.or(named).unwrap_or(addresses::METADATA.into());
        (address, self.port.or(authority.and_then(|(_, port)| port)).unwrap_or(80))
    }
}

/// The explanation of one request.
#[derive(Debug, Serialize)]
struct Explanation {
    schema: &'static str,
    request: ExplainedRequest,
    /// The route that answers; absent if none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<ExplainedRoute>,
    /// The route's conditions in their order, up to the first that is not met.
    conditions: Vec<ExplainedCondition>,
    /// When and how the route computes its answer; absent if a condition is not met.
    #[serde(skip_serializing_if = "Option::is_none")]
    computed: Option<String>,
    /// The routes of the path that do not accept the request.
    others: Vec<ExplainedRoute>,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<ExplainedAnswer>,
    /// What the node's signer would be asked to sign, if the answer needs that.
    #[serde(skip_serializing_if = "Option::is_none")]
    signing: Option<ExplainedSigning>,
    /// When the answer comes, if it waits for a change.
    #[serde(skip_serializing_if = "Option::is_none")]
    waits: Option<String>,
}

#[derive(Debug, Serialize)]
struct ExplainedRequest {
    method: String,
    path: String,
    address: IpAddr,
    port: u16,
}

#[derive(Debug, Serialize)]
struct ExplainedRoute {
    dialect: &'static str,
    methods: String,
    path: String,
    /// True if the route answers all paths below its own too.
    below: bool,
    /// The field that a request needs to reach the route.
    #[serde(skip_serializing_if = "Option::is_none")]
    header: Option<String>,
}

#[derive(Debug, Serialize)]
struct ExplainedCondition {
    demand: String,
    met: bool,
    /// The status of the answer if the condition is not met.
    status: u16,
}

/// A token or document that a node with an issuer signs. No key is read to tell.
#[derive(Debug, Serialize)]
struct ExplainedSigning {
    /// `token`, the name of a cloud's form of it, or that of a document.
    kind: &'static str,
    /// The VM's subject.
    subject: String,
    /// `None` for a document that is for everybody.
    #[serde(skip_serializing_if = "Option::is_none")]
    audience: Option<String>,
    /// The node's issuer.
    issuer: String,
    /// Where the key is that signs, and where its public half is found.
    key: String,
}

/// What the last request would have signed.
type NotedSigning = Arc<Mutex<Option<ExplainedSigning>>>;

#[derive(Debug, Serialize)]
struct ExplainedAnswer {
    status: u16,
    reason: &'static str,
    /// The TTL or hop limit of the packets, if it is not the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    hop_limit: Option<u8>,
    /// True if the connection closes afterwards.
    closes: bool,
    /// The header fields in their order, without `Date` and `Connection`.
    fields: Vec<(String, String)>,
    /// The status line and the fields as they are sent.
    #[serde(skip)]
    head: String,
    /// The body, if the method has one and it is text of at most 8 KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<String>,
    body_bytes: usize,
}

/// Writes the explanation of one request to `out`, as lines or as one JSON document.
///
/// # Errors
/// The record cannot be read, or the request is invalid.
pub fn run(question: &ExplainRequest, as_json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let explanation = explanation(question)?;
    if as_json {
        serde_json::to_writer_pretty(&mut *out, &explanation)?;
        writeln!(out)?;
    } else {
        print(&explanation, out)?;
    }
    Ok(())
}

fn explanation(question: &ExplainRequest) -> anyhow::Result<Explanation> {
    let usage = |text: String| ExitError::new(Exit::Usage, text);
    let method = Method::from_token(&question.method);
    let local = question.local();
    let fields = question.fields.iter().map(|field| {
        let (name, value) = field.split_once(':').ok_or_else(|| {
            usage(format!("expected a header field as `Name: value`, found `{}`", Printable(field)))
        })?;
        Ok(httparse::Header { name: name.trim(), value: value.trim().as_bytes() })
    });
    let fields: Vec<httparse::Header<'_>> = fields.collect::<Result<_, ExitError>>()?;
    if !question.target.starts_with('/') && !question.target.contains("://") {
        let target = Printable(&question.target);
        let text =
            format!("expected a path that begins with `/`, or a URL, found `{target}`; write `/{target}`");
        return Err(usage(text).into());
    }
    let target = normalise(&question.target).map_err(|error| {
        let target = Printable(&question.target);
        usage(format!("`{target}` is not a valid path: {error}; a guest gets 400 or 404"))
    })?;
    let (responses, signing) = rendered(question)?;
    let request = Request {
        method,
        target: target.target(),
        headers: Headers::new(&fields),
        body: question.body.as_bytes(),
    };
    let unix_seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
    let now = Now { mono: Duration::ZERO, unix_seconds };
    let remote = (addresses::METADATA.into(), question.source_port);
    let connection = Connection { slot: 0, local, remote };
    let mut explanation = Explanation {
        schema: SCHEMA,
        request: ExplainedRequest {
            method: question.method.clone(),
            path: target.target().path.to_owned(),
            address: local.0,
            port: local.1,
        },
        route: None,
        conditions: Vec::new(),
        computed: None,
        others: Vec::new(),
        answer: None,
        signing: None,
        waits: None,
    };
    explain(&responses, now, &connection, &request, &mut explanation);
    match responses.answer(now, &connection, &request, None) {
        LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => {
            explanation.answer = Some(answer(&response, method));
        }
        LiveOutcome::Park(parked) => {
            explanation.signing = signing.lock().unwrap_or_else(PoisonError::into_inner).take();
            explanation.waits = Some(match explanation.signing {
                Some(_) => format!("once it is signed, or 503 after {:?}", parked.until),
                None => format!("after a change, or after {:?}", parked.until),
            });
        }
    }
    Ok(explanation)
}

fn rendered(question: &ExplainRequest) -> anyhow::Result<(Responses, NotedSigning)> {
    if !question.record.try_exists().unwrap_or(true) {
        let record = question.record.display();
        bail!(
            "cannot read the record {record}: there is no such file; name one. This verb asks no agent: what an agent \
             serves, without its secrets, is written by `xdp-imds get --json NAME | jq .record`"
        );
    }
    let (record, _) = options::load(&question.record, &question.limits)?;
    let (vm, signing) = (VmState::alone(record.owner_text()), NotedSigning::default());
    let vm = match &question.identity {
        Some(identity) => vm.issued_by(&issuer(identity, &signing), &record),
        None => vm,
    };
    Ok((dialect::render(&record, &mut Interner::new(), vm), signing))
}

/// Makes an issuer that signs nothing, and notes what the node's signer would be asked to sign.
fn issuer(identity: &IdentityConfig, signing: &NotedSigning) -> Issuer {
    let (config, noted) = (identity.clone(), Arc::clone(signing));
    let issuer = Issuer::new(identity.trust_domain.as_deref(), move |order| {
        let key = match (order.work(), &config.certificate) {
            (SigningJob::Jwt(_), _) | (_, None) => {
                format!("{} in {}, public at {}", config.algorithm, config.keys.display(), config.jwks_uri())
            }
            (_, Some(files)) => {
                format!("{}, with the certificates in {}", files.key.display(), files.chain.display())
            }
        };
        *noted.lock().unwrap_or_else(PoisonError::into_inner) = Some(ExplainedSigning {
            kind: order.kind(),
            subject: order.subject().to_owned(),
            audience: order.audience().map(str::to_owned),
            issuer: config.issuer.clone(),
            key,
        });
        true
    });
    issuer.set_signs_documents(identity.certificate.is_some());
    issuer
}

/// Finds the route, and whether its conditions are met.
fn explain(
    responses: &Responses,
    now: Now,
    connection: &Connection,
    request: &Request<'_>,
    into: &mut Explanation,
) {
    match responses.explain(Host::at(connection.local), request) {
        LookupExplanation::Route { path, route, rest } => {
            into.route = Some(explained(path, route));
            let call = LiveRequest { now, connection, request, rest, vm: responses.vm(), parked: None };
            for guard in route.guards() {
                let (met, status) = (guard.condition.holds(&call), guard.otherwise.status().0);
                into.conditions.push(ExplainedCondition { demand: guard.condition.demand(), met, status });
                if !met {
                    return;
                }
            }
            if let Endpoint::Live(live) = route.endpoint()
                && let Some((demand, status)) = live.lacks(&call)
            {
                into.conditions.push(ExplainedCondition { demand, met: false, status: status.0 });
                return;
            }
            into.computed = Some(match route.endpoint() {
                Endpoint::Fixed(_) => "once for each version of the record".into(),
                Endpoint::Live(live) => format!("for each request: {}", live.about()),
            });
        }
        LookupExplanation::Others { routes } => {
            into.others = routes.into_iter().map(|(path, route)| explained(path, route)).collect();
        }
        LookupExplanation::Nothing => {}
    }
}

fn explained(path: &str, route: &Route) -> ExplainedRoute {
    ExplainedRoute {
        dialect: route.dialect(),
        methods: route.allowed().to_string(),
        path: path.to_owned(),
        below: route.takes_below(),
        header: route.header().map(|header| header.to_string()),
    }
}

fn answer(response: &Response, method: Method) -> ExplainedAnswer {
    let head = String::from_utf8_lossy(response.head()).into_owned();
    let fields = head.lines().skip(1).filter_map(|line| line.split_once(": "));
    let body = if method == Method::Head { Default::default() } else { response.body().to_bytes() };
    let text = std::str::from_utf8(&body).ok().filter(|text| !text.is_empty() && text.len() <= SHOWN_BYTES);
    ExplainedAnswer {
        status: response.status().0,
        reason: response.status().reason(),
        hop_limit: response.hop_limit(),
        closes: response.closes(),
        fields: fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        body: text.map(str::to_owned),
        body_bytes: body.len(),
        head,
    }
}

/// Prints the explanation as lines.
fn print(explanation: &Explanation, out: &mut dyn Write) -> io::Result<()> {
    let ExplainedRequest { method, path, address, port } = &explanation.request;
    writeln!(out, "{} {} at {address} port {port}", Printable(method), Printable(path))?;
    if let Some(route) = &explanation.route {
        writeln!(out, "  dialect     {}", route.dialect)?;
        writeln!(out, "  route       {} {}{}", route.methods, Printable(&route.path), below(route))?;
    } else if explanation.others.is_empty() {
        writeln!(out, "  no route    of the record's dialects matches this path")?;
    } else {
        writeln!(out, "  no route    accepts this method here; there are:")?;
    }
    for route in &explanation.others {
        let header = route.header.as_ref().map(|header| format!(" with {header}")).unwrap_or_default();
        let (methods, path, below) = (&route.methods, Printable(&route.path), below(route));
        writeln!(out, "              {methods} {path}{below} ({}){header}", route.dialect)?;
    }
    for ExplainedCondition { demand, met, status } in &explanation.conditions {
        let verdict = if *met { "met".into() } else { format!("not met, so the answer is {status}") };
        writeln!(out, "  condition   {demand}: {verdict}")?;
    }
    if let Some(computed) = &explanation.computed {
        writeln!(out, "  computed    {computed}")?;
    }
    if let Some(ExplainedSigning { kind, subject, audience, issuer, key }) = &explanation.signing {
        let audience = audience.as_ref().map(|one| format!(" for {}", Printable(one))).unwrap_or_default();
        let (subject, issuer) = (Printable(subject), Printable(issuer));
        writeln!(out, "  signs       {kind}{audience}: subject {subject}, issuer {issuer}")?;
        writeln!(out, "  key         {}", Printable(key))?;
    }
    if let Some(waits) = &explanation.waits {
        writeln!(out, "  answer      {waits}")?;
    }
    explanation.answer.as_ref().map_or(Ok(()), |answer| print_answer(answer, out))
}

fn print_answer(answer: &ExplainedAnswer, out: &mut dyn Write) -> io::Result<()> {
    let ExplainedAnswer { status, reason, hop_limit, closes, head, body, body_bytes, .. } = answer;
    let hop_limit = hop_limit.map(|hops| format!(", in packets of TTL {hops}")).unwrap_or_default();
    let close = if *closes { ", then the connection closes" } else { "" };
    writeln!(out, "  answer      {status} {reason}{hop_limit}{close}\n")?;
    // Without the carriage returns, and each field on its own line.
    for line in head.lines() {
        writeln!(out, "{}", Printable(line))?;
    }
    writeln!(out)?;
    match body {
        Some(text) => writeln!(out, "{}", printable_lines(text.trim_end_matches('\n'))),
        None if *body_bytes == 0 => Ok(()),
        None => writeln!(out, "({body_bytes} bytes)"),
    }
}

fn below(route: &ExplainedRoute) -> &'static str {
    if route.below { "/…" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::{ExplainRequest, run};
    use metadata_content::record::RecordLimits;
    use std::os::unix::fs::PermissionsExt as _;

    const FULL: &str = include_str!("../../../tests/vectors/record.yaml");

    fn explained(method: &str, target: &str, fields: &[&str]) -> String {
        asked(method, target, fields, false)
    }

    fn asked(method: &str, target: &str, fields: &[&str], as_json: bool) -> String {
        let dir = tempfile::tempdir().expect("a directory is made");
        let question = question(&recorded(dir.path()), method, target, fields);
        let mut out = Vec::new();
        run(&question, as_json, &mut out).expect("an explanation");
        String::from_utf8(out).expect("text")
    }

    fn recorded(dir: &std::path::Path) -> std::path::PathBuf {
        let record = dir.join("web.yaml");
        std::fs::write(&record, FULL).expect("the record is written");
        std::fs::set_permissions(&record, std::fs::Permissions::from_mode(0o640)).expect("the mode is set");
        record
    }

    fn question(record: &std::path::Path, method: &str, target: &str, fields: &[&str]) -> ExplainRequest {
        ExplainRequest {
            record: record.to_owned(),
            limits: RecordLimits::DEFAULT,
            identity: None,
            method: method.into(),
            target: target.into(),
            fields: fields.iter().map(|field| (*field).to_owned()).collect(),
            body: String::new(),
            to: None,
            port: None,
            source_port: 40_000,
        }
    }

    #[test]
    fn a_request_is_explained_by_dialect_route_and_answer() {
        let said = explained("GET", "//v1//user-data", &[]);
        let wanted = "GET /v1/user-data at 169.254.169.254 port 80\n  dialect     nocloud\n  route       \
                      GET, HEAD /v1/user-data\n  computed    once for each version of the record\n  answer      200 OK\n\n\
                      HTTP/1.1 200 OK\n";
        assert!(said.starts_with(wanted), "{said}");
        assert!(said.ends_with("\n#cloud-config\nruncmd:\n- [touch, /run/ud-ok]\n"), "{said}");
    }

    #[test]
    fn a_refusal_names_the_condition() {
        let said = explained("GET", "/v1/token", &[]);
        assert!(said.contains("condition   no field `X-Forwarded-For`: met\n"), "{said}");
        assert!(
            said.contains("condition   the field `Metadata: true`: not met, so the answer is 400\n"),
            "{said}"
        );
        let said = explained("GET", "/v1/token", &["metadata: TRUE"]);
        assert!(said.contains("condition   the field `Metadata: true`: met\n"), "{said}");
        let said = explained("GET", "/v1/token", &["metadata: TRUE", "X-Forwarded-For: 1"]);
        assert!(said.contains("no field `X-Forwarded-For`: not met, so the answer is "), "{said}");
        assert!(!said.contains("refused with"), "a condition is what is demanded: {said}");
        let said = explained("GET", "/v1/token", &["metadata: TRUE"]);
        assert!(said.contains("answer      200 OK"), "{said}");
        let said = explained("GET", "/computeMetadata/v1/", &["Metadata-Flavor: Google"]);
        assert!(said.contains("route       any method /computeMetadata/…\n"), "{said}");
    }

    #[test]
    fn a_refusal_by_the_answer_itself_names_what_the_request_lacks() {
        let aws = "X-aws-ec2-metadata-token-ttl-seconds";
        let wanted =
            format!("condition   the field `{aws}` with 1 to 21600 seconds: not met, so the answer is 400\n");
        for (target, fields) in
            [("/latest/api/token", vec![]), ("/latest/api/token", vec![format!("{aws}: 21601")])]
        {
            let fields: Vec<_> = fields.iter().map(String::as_str).collect();
            let said = explained("PUT", target, &fields);
            assert!(said.contains(&wanted) && said.contains("answer      400 Bad Request"), "{said}");
            assert!(!said.contains("computed"), "{said}");
        }
        let said = explained("PUT", "/latest/api/token", &[&format!("{aws}: 60")]);
        assert!(!said.contains("not met") && said.contains("answer      200 OK"), "{said}");
        let said = explained("PUT", "/v1/token", &[]);
        assert!(
            said.contains("the field `Metadata-Token-Expiry-Seconds` with 1 to 86400 seconds: not met"),
            "{said}"
        );
    }

    #[test]
    fn a_target_without_its_first_slash_is_refused_with_the_path_that_is_meant() {
        let dir = tempfile::tempdir().expect("a directory is made");
        let question = question(&recorded(dir.path()), "GET", "latest/user-data", &[]);
        let error = run(&question, false, &mut Vec::new()).expect_err("no path").to_string();
        assert!(error.contains("found `latest/user-data`; write `/latest/user-data`"), "{error}");
    }

    #[test]
    fn a_name_that_is_no_file_is_refused_with_the_way_to_a_file() {
        let question = question(std::path::Path::new("/nowhere/web-1"), "GET", "/latest", &[]);
        let error = run(&question, false, &mut Vec::new()).expect_err("no file").to_string();
        assert!(
            error.contains("the record /nowhere/web-1: there is no such file")
                && error.contains("xdp-imds get --json"),
            "{error}"
        );
    }

    #[test]
    fn what_a_node_with_an_issuer_signs_is_explained_with_subject_issuer_and_key() {
        let dir = tempfile::tempdir().expect("a directory is made");
        let record = recorded(dir.path());
        let identity = serde_json::json!({
            "issuer": "https://imds.example",
            "keys": "/etc/keys",
            "trust_domain": "example.org",
            "certificate": {"chain": "/etc/chain.pem", "key": "/etc/rsa.pem"},
        });
        let said = |target: &str, identity: Option<&serde_json::Value>| {
            let identity = identity.map(|one| serde_json::from_value(one.clone()).expect("an issuer"));
            let question =
                ExplainRequest { identity, ..question(&record, "GET", target, &["Metadata: true"]) };
            let mut out = Vec::new();
            run(&question, false, &mut out).expect("an explanation");
            String::from_utf8(out).expect("text")
        };
        let token = "/v1/identity/jwt?audience=vault";
        let without = said(token, None);
        assert!(without.contains("answer      404 ") && !without.contains("  signs  "), "{without}");
        let subject = "subject spiffe://example.org/vm/7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
        for (target, signs, key) in [
            (
                token,
                "token for vault",
                "ES256 in /etc/keys, public at https://imds.example/.well-known/jwks.json",
            ),
            (
                "/latest/dynamic/instance-identity/pkcs7",
                "pkcs7",
                "/etc/rsa.pem, with the certificates in /etc/chain.pem",
            ),
        ] {
            let said = said(target, Some(&identity));
            let wanted = format!(
                "  signs       {signs}: {subject}, issuer https://imds.example\n  key         {key}\n  answer      once \
                 it is signed, or 503 after 2s\n"
            );
            assert!(said.contains(&wanted), "wanted {wanted}\ngot {said}");
        }
    }

    #[test]
    fn a_request_without_a_route_is_reported() {
        assert!(explained("GET", "/nope", &[]).contains("no route    of the record's dialects"));
        let said = explained("POST", "/healthz", &[]);
        assert!(
            said.contains("accepts this method here") && said.contains("GET, HEAD /healthz (kubevirt)"),
            "{said}"
        );
        assert!(said.contains("answer      405 Method Not Allowed"), "{said}");
    }

    #[test]
    fn a_url_sets_address_and_port() {
        for (url, at) in [
            ("http://169.254.42.42/conf", "/conf at 169.254.42.42 port 80\n"),
            ("http://169.254.169.254:8080/", "/ at 169.254.169.254 port 8080\n"),
            ("http://168.63.129.16:32526/health", "/health at 168.63.129.16 port 32526\n"),
            ("http://[fd00:ec2::254]/latest", "/latest at fd00:ec2::254 port 80\n"),
            ("http://[fe80::a9fe:a9fe%25eth0]:80/x", "/x at fe80::a9fe:a9fe port 80\n"),
            ("/x", "/x at 169.254.169.254 port 80\n"),
        ] {
            assert!(explained("GET", url, &[]).starts_with(&format!("GET {at}")), "{url}");
        }
    }

    #[test]
    fn the_json_document_has_the_members_of_its_schema() {
        let parsed = |method: &str, target: &str| -> serde_json::Value {
            serde_json::from_str(&asked(method, target, &[], true)).expect("JSON")
        };
        let expected = serde_json::json!({
            "schema": "explain/1",
            "request": {"method": "GET", "path": "/v1/user-data", "address": "169.254.169.254", "port": 80},
            "route": {"dialect": "nocloud", "methods": "GET, HEAD", "path": "/v1/user-data", "below": false},
            "conditions": [],
            "computed": "once for each version of the record",
            "others": [],
            "answer": {
                "status": 200,
                "reason": "OK",
                "closes": false,
                "fields": [],
                "body": "#cloud-config\nruncmd:\n- [touch, /run/ud-ok]\n",
                "body_bytes": 44,
            },
        });
        let mut found = parsed("GET", "//v1//user-data");
        let fields = found["answer"]["fields"].take();
        found["answer"]["fields"] = serde_json::json!([]);
        assert_eq!(found, expected);
        assert!(
            fields
                .as_array()
                .is_some_and(|fields| fields.contains(&serde_json::json!(["Content-Length", "44"]))),
            "{fields}"
        );
        let found = parsed("GET", "/v1/token");
        let failed = serde_json::json!({"demand": "the field `Metadata: true`", "met": false, "status": 400});
        assert!(found["conditions"].as_array().is_some_and(|all| all.contains(&failed)), "{found}");
        let found = parsed("POST", "/healthz");
        assert_eq!(
            (&found["route"], &found["others"][0]["dialect"]),
            (&serde_json::Value::Null, &"kubevirt".into())
        );
    }
}
