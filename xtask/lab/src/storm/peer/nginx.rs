//! The peer nginx (Debian's package), which serves the guests' documents as files: one server on the node, behind
//! bridges with all taps on them.
//!
//! nginx is tuned as a good operator would do it: a worker per core with a listener of its own, `sendfile`, accepting
//! only after the request has arrived, open files cached if they all fit, and no log. These alternatives were measured
//! as slower or equal: `sendfile off`, no cache, bodies in a `map`.

use super::network::Networks;
use super::process::{self, Answers, Server, descriptors};
use super::process::{Entry, Site};
use super::{OWN_MAC, Running, Scene, Subject};
use anyhow::{Context as _, Result, ensure};
use std::fmt::Write as _;
use std::path::Path;
use support::guest::METADATA;

/// Connections of one worker; more than there are guests.
const CONNECTIONS: u32 = 8_192;
/// Bytes of the longest body that nginx can hold in its configuration, whose buffer has 4,096 bytes.
const MAX_RETURN: usize = 2_048;

/// How requests reach nginx, and how it identifies the guest.
#[derive(Clone, Copy)]
pub(super) enum Listen<'a> {
    /// Directly, by the connection's source address.
    Guests,
    /// From proxies over a Unix socket, by the address that they saw.
    Proxies(&'a Path),
}

/// A pattern for a MAC as guests write it in a path.
const MAC_PATTERN: &str = "[0-9a-f:]{17}";

/// The subject nginx.
#[derive(Default)]
pub(crate) struct Nginx {
    site: Option<Site>,
}

/// A running nginx and its bridges.
struct Serving<'a> {
    // Fields are dropped in this order, so that the server ends before its bridges are deleted.
    server: Server,
    networks: Networks<'a>,
}

impl Subject for Nginx {
    fn name(&self) -> &'static str {
        "nginx"
    }

    fn version(&self) -> Result<String> {
        process::version("nginx", "-v")
    }

    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()> {
        self.site = Some(Site::lay_out(scene.tenants)?);
        Ok(())
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>> {
        let site = self.site.as_ref().context("`prepare` was not called for nginx")?;
        let networks = Networks::on_node(scene.node, scene.tenants)?;
        let server = spawn(scene, site, Listen::Guests)?;
        Ok(Box::new(Serving { server, networks }))
    }
}

impl Running for Serving<'_> {
    fn pids(&self) -> Vec<u32> {
        self.server.pids()
    }

    fn stop(self: Box<Self>) -> Result<()> {
        self.server.end()?;
        self.networks.remove()
    }
}

/// Starts nginx on the node.
pub(super) fn spawn(scene: &Scene<'_>, site: &Site, listen: Listen<'_>) -> Result<Server> {
    let file = site.directory().join("nginx.conf");
    std::fs::write(&file, configuration(site, listen, scene.cores)?)?;
    let mut command = process::command("nginx", scene.pinned)?;
    command.arg("-c").arg(&file).arg("-p").arg(site.directory());
    let answers = match listen {
        Listen::Guests => Answers::At(METADATA),
        Listen::Proxies(path) => Answers::On(path),
    };
    Server::start("nginx", scene.node, &mut command, site.directory().join("nginx.log"), &answers)
}

/// Returns the configuration file.
fn configuration(site: &Site, listen: Listen<'_>, workers: usize) -> Result<String> {
    let directory = site.directory().display();
    let descriptors = descriptors();
    let connections = CONNECTIONS.min(descriptors / 2);
    let room = usize::try_from(descriptors - connections)?.saturating_sub(256);
    // Every guest fetches each of its files once per boot, so a cache smaller than their number would never hit.
    let cache = if site.files() <= room {
        format!("open_file_cache max={room} inactive=1h; open_file_cache_valid 1h;")
    } else {
        "open_file_cache off;".to_owned()
    };
    let (listener, address) = match listen {
        Listen::Guests => (format!("{METADATA}:80 reuseport deferred backlog=65535"), "$remote_addr"),
        Listen::Proxies(path) => (format!("unix:{} backlog=65535", path.display()), "$http_x_forwarded_for"),
    };
    let mut text = format!(
        "daemon off;\nuser root;\nworker_processes {workers};\nworker_rlimit_nofile {descriptors};\n\
         error_log stderr error;\npid {directory}/nginx.pid;\n\
         events {{ worker_connections {connections}; multi_accept on; use epoll; }}\n\
         http {{\n\
         access_log off; log_not_found off; server_tokens off; etag off; if_modified_since off; max_ranges 0;\n\
         sendfile on; tcp_nopush on; tcp_nodelay on; {cache}\n\
         keepalive_timeout 75s; keepalive_requests 1000000; reset_timedout_connection on;\n\
         types {{ }}\n"
    );
    for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        writeln!(text, "{kind}_temp_path {directory}/{kind};")?;
    }
    writeln!(text, "server {{\nlisten {listener};\nroot {directory};\nlocation / {{ return 404; }}")?;
    for entry in site.entries() {
        writeln!(text, "{}", location(site, entry, address)?)?;
    }
    text.push_str("}\n}\n");
    Ok(text)
}

fn location(site: &Site, entry: &Entry, address: &str) -> Result<String> {
    let Entry { path, method, status, content_type, shared, number } = entry;
    let kind = if content_type.is_empty() { "text/plain" } else { content_type };
    ensure!(
        !kind.contains(['"', '\\', '$', '\n']),
        "{path}: the type {kind} cannot be written in nginx's configuration"
    );
    let matching = if path.contains(OWN_MAC) {
        let (before, after) = path.split_once(OWN_MAC).unwrap_or((path, ""));
        format!("~ \"^{}{MAC_PATTERN}{}$\"", before.replace('.', "\\."), after.replace('.', "\\."))
    } else {
        format!("= {path}")
    };
    let head = format!("location {matching} {{ default_type \"{kind}\";");
    // A file can answer only GET and HEAD, and only with 200.
    if *status != 200 || method != "GET" {
        let body = shared.as_deref().unwrap_or_default();
        return Ok(format!("{head} return {status}{}; }}", quoted(path, body)?));
    }
    let file = site.file(address, entry);
    // nginx searches for an index file if a path ends in a slash, so such a path is rewritten to its file's name. In a
    // location with a pattern, an alias is the whole file name; in other locations, the rest of the path is appended to
    // it.
    Ok(if path.ends_with('/') {
        let owner = if shared.is_some() { "all" } else { address };
        format!("{head} rewrite ^ /{owner}/{number} break; }}")
    } else {
        format!("{head} alias {}; }}", file.display())
    })
}

/// Returns a body as a quoted word of the configuration with a space before it; empty for an empty body.
fn quoted(path: &str, body: &[u8]) -> Result<String> {
    if body.is_empty() {
        return Ok(String::new());
    }
    let text = std::str::from_utf8(body).ok().filter(|text| text.len() <= MAX_RETURN && !text.contains('$'));
    let text = text.ok_or_else(|| {
        anyhow::anyhow!("{path}: nginx can return only text of at most {MAX_RETURN} bytes without `$`")
    })?;
    Ok(format!(" \"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")))
}
