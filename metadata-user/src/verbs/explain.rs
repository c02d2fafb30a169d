//! `xdp-imds explain`: prints which dialect answers a request, the answer and the reason.

use std::fmt;
use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};

use metadata_base::addresses;
use metadata_base::connection::Connection;
use metadata_base::printable::{Printable, printable_lines};
use metadata_base::time::Now;
use metadata_content::dialect;
use metadata_content::http::target::normalise;
use metadata_content::http::{Headers, Method, Request, Response};
use metadata_content::record::Limits;
use metadata_content::store::{Call, Endpoint, Explained, Host, Interner, Outcome, Responses, Route, Vm};
use metadata_feed::directory;

/// Maximum number of octets printed of a body.
const SHOWN_OCTETS: usize = 8 << 10;

/// The request to explain.
#[derive(Clone)]
pub struct Question {
    /// The record file.
    pub record: PathBuf,
    /// Size limits of the record.
    pub limits: Limits,
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

impl fmt::Debug for Question {
    /// Leaves out header fields and body, which can hold tokens and passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { record, method, target, .. } = self;
        let mut shown = f.debug_struct("Question");
        shown.field("record", record).field("method", method).field("target", target).finish_non_exhaustive()
    }
}

impl Question {
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

/// Writes the explanation of one request to `out`.
///
/// # Errors
/// The record cannot be read, or the request is invalid.
pub fn run(question: &Question, out: &mut dyn Write) -> anyhow::Result<()> {
    let responses = rendered(question)?;
    let method = Method::from_token(&question.method);
    let local = question.local();
    let fields = question.fields.iter().map(|field| {
        let (name, value) = field
            .split_once(':')
            .with_context(|| format!("expected a header field as `Name: value`, found `{field}`"))?;
        Ok(httparse::Header { name: name.trim(), value: value.trim().as_bytes() })
    });
    let fields: Vec<httparse::Header<'_>> = fields.collect::<anyhow::Result<_>>()?;
    let target = match normalise(&question.target) {
        Ok(target) => target,
        Err(error) => bail!("{} is not a valid path: {error}; a guest gets 400 or 404", question.target),
    };
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
    writeln!(
        out,
        "{} {} at {} port {}",
        Printable(&question.method),
        Printable(target.target().path),
        local.0,
        local.1
    )?;
    why(&responses, now, &connection, &request, out)?;
    match responses.answer(now, &connection, &request, None) {
        Outcome::Ready(response) | Outcome::Changed(response) => answer(&response, method, out)?,
        Outcome::Park(parked) => {
            writeln!(out, "  answer      after a change, or after {:?}", parked.until)?;
        }
    }
    Ok(())
}

fn rendered(question: &Question) -> anyhow::Result<Responses> {
    let path = &question.record;
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| format!("{}: expected a record file", path.display()))?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(".".as_ref());
    let loaded = directory::load(dir, name, &question.limits)
        .with_context(|| format!("{}: expected a record (*.yaml, *.yml or *.json)", path.display()))?;
    let (record, _) = loaded.record?;
    Ok(dialect::render(&record, &mut Interner::new(), Vm::alone(record.owner_text())))
}

/// Prints the route and whether its conditions hold.
fn why(
    responses: &Responses,
    now: Now,
    connection: &Connection,
    request: &Request<'_>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    match responses.explain(Host::at(connection.local), request) {
        Explained::Route { path, route, rest } => {
            writeln!(out, "  dialect     {}", route.dialect())?;
            writeln!(out, "  route       {} {}{}", route.allowed(), Printable(path), below(route))?;
            let call = Call { now, connection, request, rest, vm: responses.vm(), parked: None };
            for guard in route.guards() {
                let holds = guard.condition.holds(&call);
                let verdict =
                    if holds { "holds".into() } else { format!("fails: {}", guard.otherwise.status().0) };
                writeln!(out, "  condition   {}: {verdict}", guard.condition)?;
                if !holds {
                    return Ok(());
                }
            }
            match route.endpoint() {
                Endpoint::Fixed(_) => writeln!(out, "  computed    once for each version of the record")?,
                Endpoint::Live(live) => writeln!(out, "  computed    for each request: {}", live.about())?,
            }
        }
        Explained::Others { routes } => {
            writeln!(out, "  no route    accepts this method here; there are:")?;
            for (path, route) in routes {
                let header = route.header().map(|header| format!(" with {header}")).unwrap_or_default();
                writeln!(
                    out,
                    "              {} {}{} ({}){header}",
                    route.allowed(),
                    Printable(path),
                    below(route),
                    route.dialect()
                )?;
            }
        }
        Explained::Nothing => {
            writeln!(out, "  no route    of the record's dialects matches this path")?;
        }
    }
    Ok(())
}

fn below(route: &Route) -> &'static str {
    if route.takes_below() { "/…" } else { "" }
}

fn answer(response: &Response, method: Method, out: &mut dyn Write) -> anyhow::Result<()> {
    let hop_limit =
        response.hop_limit().map(|hops| format!(", in packets of TTL {hops}")).unwrap_or_default();
    let close = if response.closes() { ", then the connection closes" } else { "" };
    writeln!(
        out,
        "  answer      {} {}{hop_limit}{close}\n",
        response.status().0,
        response.status().reason()
    )?;
    // Without the carriage returns, and each field on its own line.
    for line in String::from_utf8_lossy(response.head()).lines() {
        writeln!(out, "{}", Printable(line))?;
    }
    writeln!(out)?;
    let body = response.body().to_bytes();
    if method == Method::Head || body.is_empty() {
        return Ok(());
    }
    match std::str::from_utf8(&body) {
        Ok(text) if body.len() <= SHOWN_OCTETS => {
            writeln!(out, "{}", printable_lines(text.trim_end_matches('\n')))?
        }
        _ => writeln!(out, "({} octets)", body.len())?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Question, run};
    use metadata_content::record::Limits;
    use std::os::unix::fs::PermissionsExt as _;

    const FULL: &str = include_str!("../../../tests/vectors/record.yaml");

    fn explained(method: &str, target: &str, fields: &[&str]) -> String {
        let dir = tempfile::tempdir().expect("a directory is made");
        let record = dir.path().join("web.yaml");
        std::fs::write(&record, FULL).expect("the record is written");
        std::fs::set_permissions(&record, std::fs::Permissions::from_mode(0o640)).expect("the mode is set");
        let question = Question {
            record,
            limits: Limits::DEFAULT,
            method: method.into(),
            target: target.into(),
            fields: fields.iter().map(|field| (*field).to_owned()).collect(),
            body: String::new(),
            to: None,
            port: None,
            source_port: 40_000,
        };
        let mut out = Vec::new();
        run(&question, &mut out).expect("an explanation");
        String::from_utf8(out).expect("text")
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
        assert!(said.contains("condition   refused with X-Forwarded-For: holds\n"), "{said}");
        assert!(said.contains("condition   needs Metadata: true: fails: 400\n"), "{said}");
        let said = explained("GET", "/v1/token", &["metadata: TRUE"]);
        assert!(said.contains("condition   needs Metadata: true: holds\n"), "{said}");
        assert!(said.contains("answer      200 OK"), "{said}");
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
}
