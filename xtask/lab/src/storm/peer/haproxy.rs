//! The peers `haproxy` and `neutron`: a proxy for each network, as in OpenStack Neutron. Each network's metadata
//! address is in a namespace of its own, where a haproxy serves it.
//!
//! There are two forms. [`Form::Answers`] is the fastest that a proxy per network can be: haproxy holds every guest's
//! documents in memory and answers without a server behind it. [`Form::Forwards`] is Neutron's chain: haproxy adds
//! `X-Forwarded-For` and the network's id, and forwards requests over a Unix socket to one server on the node, which
//! identifies the guest by them. That server is nginx with files here, and connections to it are kept. This favours the
//! peer: Neutron's agent is a Python program that asks Nova for each answer.

use super::network::{Networks, shares};
use super::nginx::{self, Listen};
use super::process::{self, Answers, Server};
use super::process::{Entry, Site};
use super::{OWN_MAC, Running, Scene, Subject};
use anyhow::{Context as _, Result, ensure};
use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use support::guest::METADATA;

/// Bytes of the largest body that haproxy answers by itself. The whole response must fit into one of its buffers, and
/// every connection takes two.
const MAX_BODY: usize = 256 << 10;
/// Bytes of a buffer in addition to the body: the head, and the space that haproxy reserves for rewriting.
const BUFFER_MARGIN: usize = 4_096;
/// haproxy's default buffer size, in bytes.
const USUAL_BUFFER: usize = 16_384;
/// Connections of one haproxy in addition to two per guest.
const MORE_CONNECTIONS: usize = 256;

/// The program that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// haproxy itself.
    Answers,
    /// A server on the node, over a Unix socket.
    Forwards,
}

/// A subject with a proxy for each network.
pub(crate) struct Haproxy {
    form: Form,
    networks: usize,
    site: Option<Site>,
}

/// Running proxies and their networks.
struct Serving<'a> {
    // Fields are dropped in this order, so that servers end before their bridges are deleted.
    proxies: Vec<Server>,
    backend: Option<Server>,
    networks: Networks<'a>,
}

impl Haproxy {
    /// Makes a subject that distributes the guests over `networks` networks.
    pub(crate) fn new(form: Form, networks: usize) -> Self {
        Self { form, networks, site: None }
    }
}

impl Subject for Haproxy {
    fn name(&self) -> &'static str {
        match self.form {
            Form::Answers => "haproxy",
            Form::Forwards => "neutron",
        }
    }

    fn version(&self) -> Result<String> {
        let own = process::version("haproxy", "-v")?;
        let backend = match self.form {
            Form::Answers => String::new(),
            Form::Forwards => format!(", {}", process::version("nginx", "-v")?),
        };
        Ok(format!("{own}{backend}, {} networks", self.networks))
    }

    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()> {
        let site = Site::lay_out(scene.tenants)?;
        let shared = shared_map(&site)?;
        let socket = site.directory().join("backend");
        for (number, share) in shares(scene.tenants.len(), self.networks)?.into_iter().enumerate() {
            let threads = (scene.cores / self.networks).max(1);
            let head = head(share.len(), threads, site.largest());
            let text = match self.form {
                Form::Answers => head + &answering(&site, &shared, share)?,
                Form::Forwards => head + &forwarding(number, &socket),
            };
            std::fs::write(configuration(&site, number), text)?;
        }
        self.site = Some(site);
        Ok(())
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>> {
        let site =
            self.site.as_ref().with_context(|| format!("`prepare` was not called for {}", self.name()))?;
        let networks = Networks::apart(scene.node, scene.tenants, self.networks)?;
        let backend = match self.form {
            Form::Answers => None,
            Form::Forwards => {
                let socket = site.directory().join("backend");
                // nginx leaves its socket behind when it is killed, and then could not start again.
                let _ = std::fs::remove_file(&socket);
                Some(nginx::spawn(scene, site, Listen::Proxies(&socket))?)
            }
        };
        let mut proxies = Vec::new();
        for (number, ns) in networks.namespaces().iter().enumerate() {
            let mut command = process::command("haproxy", scene.pinned)?;
            command.arg("-db").arg("-q").arg("-f").arg(configuration(site, number));
            let log = site.directory().join(format!("haproxy-{number}.log"));
            proxies.push(Server::start("haproxy", ns, &mut command, log, &Answers::At(METADATA))?);
        }
        Ok(Box::new(Serving { proxies, backend, networks }))
    }
}

impl Running for Serving<'_> {
    fn pids(&self) -> Vec<u32> {
        self.proxies.iter().chain(&self.backend).flat_map(Server::pids).collect()
    }

    fn stop(self: Box<Self>) -> Result<()> {
        let Self { proxies, backend, networks } = *self;
        proxies.into_iter().chain(backend).try_for_each(Server::end)?;
        networks.remove()
    }
}

fn configuration(site: &Site, number: usize) -> PathBuf {
    site.directory().join(format!("haproxy-{number}.cfg"))
}

/// Returns the first part of both configurations. The timeouts are Neutron's.
fn head(guests: usize, threads: usize, largest: usize) -> String {
    let buffer = (largest + BUFFER_MARGIN).max(USUAL_BUFFER);
    let buffer = if largest > MAX_BODY { USUAL_BUFFER } else { buffer };
    format!(
        "global\n  maxconn {}\n  nbthread {threads}\n  tune.bufsize {buffer}\n\
         defaults\n  mode http\n  retries 3\n  timeout http-request 30s\n  timeout connect 30s\n  \
         timeout client 32s\n  timeout server 32s\n  timeout http-keep-alive 30s\n",
        2 * guests + MORE_CONNECTIONS
    )
}

fn bind() -> String {
    format!("bind {METADATA}:80 backlog 65535 defer-accept")
}

/// Returns Neutron's listener, with connections to the backend kept and used again.
fn forwarding(number: usize, socket: &Path) -> String {
    format!(
        "listen metadata\n  {}\n  option forwardfor\n  http-reuse always\n  \
         http-request set-header X-Neutron-Network-ID 00000000-0000-4000-8000-{number:012x}\n  \
         server metadata unix@{}\n",
        bind(),
        socket.display()
    )
}

/// Whether all guests share this document under the same path.
fn is_shared(entry: &Entry) -> bool {
    entry.shared.is_some() && !entry.path.contains(OWN_MAC)
}

/// Writes the map of paths that are the same for all guests. haproxy finds such a path by one look-up.
fn shared_map(site: &Site) -> Result<PathBuf> {
    let file = site.directory().join("shared.map");
    let mut text = String::new();
    for entry in site.entries().iter().filter(|entry| is_shared(entry)) {
        writeln!(text, "{} {}", entry.path, entry.number)?;
    }
    std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

/// Returns a backend for each guest, found by its source address, and one for each shared document.
fn answering(site: &Site, shared: &Path, share: Range<usize>) -> Result<String> {
    ensure!(
        site.largest() <= MAX_BODY,
        "haproxy by itself answers bodies of at most {} KiB, and one has {} KiB; leave this peer out or use neutron",
        MAX_BODY >> 10,
        site.largest() >> 10
    );
    let map = format!("path,map_str({})", shared.display());
    let mut text = format!(
        "frontend metadata\n  {}\n  use_backend all_%[{map}] if {{ {map} -m found }}\n  use_backend vm_%[src]\n",
        bind()
    );
    let (shared, own): (Vec<&Entry>, Vec<_>) = site.entries().iter().partition(|entry| is_shared(entry));
    for entry in shared {
        writeln!(text, "backend all_{}\n  {}", entry.number, answer(site, "", entry))?;
    }
    for (address, mac) in &site.guests()[share] {
        writeln!(text, "backend vm_{address}")?;
        for entry in &own {
            let path = entry.path.replace(OWN_MAC, &mac.to_string());
            writeln!(text, "  {} if {{ path {path} }}", answer(site, address, entry))?;
        }
    }
    Ok(text)
}

fn answer(site: &Site, address: &str, entry: &Entry) -> String {
    let Entry { status, content_type, shared, .. } = entry;
    if shared.as_ref().is_some_and(|body| body.is_empty()) {
        return format!("http-request return status {status}");
    }
    let kind = if content_type.is_empty() { "text/plain" } else { content_type };
    format!(
        "http-request return status {status} content-type \"{kind}\" file {}",
        site.file(address, entry).display()
    )
}
