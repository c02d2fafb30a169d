//! The servers of the peers.
//!
//! `haproxy` is a proxy for each network, as in OpenStack Neutron. Each network's metadata address is in a namespace of
//! its own, where a haproxy serves it. It is the fastest that a proxy per network can be: haproxy holds every guest's
//! documents in memory and answers without a server behind it. Neutron's own chain is in [`neutron`](super::neutron).

use anyhow::{Context as _, Result, ensure};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::guest::METADATA;
use tempfile::TempDir;

use super::{
    Answers, Networks, OWN_MAC, PageEntry, PeerPage, PeerSite, Running, Scene, Server, Subject, Tenant,
    command, descriptors, shares, version,
};

/// Bytes of the largest body that haproxy answers by itself. The whole response must fit into one of its buffers, and
/// every connection takes two.
const MAX_BODY: usize = 256 << 10;
/// Bytes of a buffer in addition to the body: the head, and the space that haproxy reserves for rewriting.
const BUFFER_MARGIN: usize = 4_096;
/// haproxy's default buffer size, in bytes.
const USUAL_BUFFER: usize = 16_384;
/// Connections of one haproxy in addition to two per guest.
const MORE_CONNECTIONS: usize = 256;

/// A subject with a proxy for each network.
pub(crate) struct Haproxy {
    networks: usize,
    site: Option<PeerSite>,
}

/// Running proxies and their networks.
struct HaproxyServing<'a> {
    // Fields are dropped in this order, so that servers end before their bridges are deleted.
    proxies: Vec<Server>,
    networks: Networks<'a>,
}

impl Haproxy {
    /// Makes a subject that distributes the guests over `networks` networks.
    pub(crate) fn new(networks: usize) -> Self {
        Self { networks, site: None }
    }
}

impl Subject for Haproxy {
    fn name(&self) -> &'static str {
        "haproxy"
    }

    fn version(&self) -> Result<String> {
        Ok(format!("{}, {} networks", version("haproxy", "-v")?, self.networks))
    }

    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()> {
        let site = PeerSite::lay_out(scene.tenants)?;
        let shared = shared_map(&site)?;
        for (number, share) in shares(scene.tenants.len(), self.networks)?.into_iter().enumerate() {
            let threads = (scene.cores / self.networks).max(1);
            let head = head(share.len(), threads, site.largest());
            let text = head + &answering(&site, &shared, share)?;
            std::fs::write(configuration_file(&site, number), text)?;
        }
        self.site = Some(site);
        Ok(())
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>> {
        let site =
            self.site.as_ref().with_context(|| format!("`prepare` was not called for {}", self.name()))?;
        let networks = Networks::apart(scene.node, scene.tenants, self.networks)?;
        let mut proxies = Vec::new();
        for (number, ns) in networks.namespaces().iter().enumerate() {
            let mut command = command("haproxy", scene.pinned)?;
            command.arg("-db").arg("-q").arg("-f").arg(configuration_file(site, number));
            let log = site.directory().join(format!("haproxy-{number}.log"));
            proxies.push(Server::start(
                "haproxy",
                ns,
                &mut command,
                log,
                &Answers::At((METADATA, 80).into()),
            )?);
        }
        Ok(Box::new(HaproxyServing { proxies, networks }))
    }
}

impl Running for HaproxyServing<'_> {
    fn pids(&self) -> Vec<u32> {
        self.proxies.iter().flat_map(Server::pids).collect()
    }

    fn stop(self: Box<Self>) -> Result<()> {
        let Self { proxies, networks } = *self;
        proxies.into_iter().try_for_each(Server::end)?;
        networks.remove()
    }
}

fn configuration_file(site: &PeerSite, number: usize) -> PathBuf {
    site.directory().join(format!("haproxy-{number}.cfg"))
}

/// Returns the first part of the configuration. The timeouts are Neutron's.
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

/// Whether all guests share this document under the same path.
fn is_shared(entry: &PageEntry) -> bool {
    entry.shared.is_some() && !entry.path.contains(OWN_MAC)
}

/// Writes the map of paths that are the same for all guests. haproxy finds such a path by one look-up.
fn shared_map(site: &PeerSite) -> Result<PathBuf> {
    let file = site.directory().join("shared.map");
    let mut text = String::new();
    for entry in site.entries().iter().filter(|entry| is_shared(entry)) {
        writeln!(text, "{} {}", entry.path, entry.number)?;
    }
    std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

/// Returns a backend for each guest, found by its source address, and one for each shared document.
fn answering(site: &PeerSite, shared: &Path, share: Range<usize>) -> Result<String> {
    ensure!(
        site.largest() <= MAX_BODY,
        "haproxy by itself answers bodies of at most {} KiB, and one has {} KiB; leave this peer out",
        MAX_BODY >> 10,
        site.largest() >> 10
    );
    let map = format!("path,map_str({})", shared.display());
    let mut text = format!(
        "frontend metadata\n  {}\n  use_backend all_%[{map}] if {{ {map} -m found }}\n  use_backend vm_%[src]\n",
        bind()
    );
    let (shared, own): (Vec<&PageEntry>, Vec<_>) = site.entries().iter().partition(|entry| is_shared(entry));
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

fn answer(site: &PeerSite, address: &str, entry: &PageEntry) -> String {
    let PageEntry { status, content_type, shared, .. } = entry;
    if shared.as_ref().is_some_and(|body| body.is_empty()) {
        return format!("http-request return status {status}");
    }
    let kind = if content_type.is_empty() { "text/plain" } else { content_type };
    format!(
        "http-request return status {status} content-type \"{kind}\" file {}",
        site.file(address, entry).display()
    )
}

// The peer nginx (Debian's package), which serves the guests' documents as files: one server on the node, behind
// bridges with all taps on them.
//
// nginx is tuned as a good operator would do it: a worker per core with a listener of its own, `sendfile`, accepting
// only after the request has arrived, open files cached if they all fit, and no log. These alternatives were measured
// as slower or equal: `sendfile off`, no cache, bodies in a `map`.

/// Connections of one worker; more than there are guests.
const CONNECTIONS: u32 = 8_192;
/// Bytes of the longest body that nginx can hold in its configuration, whose buffer has 4,096 bytes.
const MAX_RETURN: usize = 2_048;

/// How requests reach nginx, and how it identifies the guest.
#[derive(Clone, Copy)]
pub(super) enum Listen {
    /// Directly, by the connection's source address.
    Guests,
    /// From metadata agents at an address, as Nova, by the guest's address that they name.
    Agents(SocketAddr),
}

/// The path at which nginx says how many requests it had.
pub(super) const COUNTS: &str = "/nginx-status";
/// A pattern for a MAC as guests write it in a path.
const MAC_PATTERN: &str = "[0-9a-f:]{17}";

/// The subject nginx.
#[derive(Default)]
pub(crate) struct Nginx {
    site: Option<PeerSite>,
}

/// A running nginx and its bridges.
struct NginxServing<'a> {
    // Fields are dropped in this order, so that the server ends before its bridges are deleted.
    server: Server,
    networks: Networks<'a>,
}

impl Subject for Nginx {
    fn name(&self) -> &'static str {
        "nginx"
    }

    fn version(&self) -> Result<String> {
        version("nginx", "-v")
    }

    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()> {
        self.site = Some(PeerSite::lay_out(scene.tenants)?);
        Ok(())
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>> {
        let site = self.site.as_ref().context("`prepare` was not called for nginx")?;
        let networks = Networks::on_node(scene.node, scene.tenants)?;
        let server = spawn(scene, site, Listen::Guests)?;
        Ok(Box::new(NginxServing { server, networks }))
    }
}

impl Running for NginxServing<'_> {
    fn pids(&self) -> Vec<u32> {
        self.server.pids()
    }

    fn stop(self: Box<Self>) -> Result<()> {
        self.server.end()?;
        self.networks.remove()
    }
}

/// Starts nginx on the node.
pub(super) fn spawn(scene: &Scene<'_>, site: &PeerSite, listen: Listen) -> Result<Server> {
    let file = site.directory().join("nginx.conf");
    std::fs::write(&file, nginx_configuration(site, listen, scene.cores)?)?;
    let mut command = command("nginx", scene.pinned)?;
    command.arg("-c").arg(&file).arg("-p").arg(site.directory());
    let answers = match listen {
        Listen::Guests => Answers::At((METADATA, 80).into()),
        Listen::Agents(address) => Answers::At(address),
    };
    Server::start("nginx", scene.node, &mut command, site.directory().join("nginx.log"), &answers)
}

/// Returns the configuration file.
fn nginx_configuration(site: &PeerSite, listen: Listen, workers: usize) -> Result<String> {
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
        Listen::Agents(address) => (format!("{address} reuseport backlog=65535"), "$http_x_forwarded_for"),
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
    writeln!(text, "location = {COUNTS} {{ stub_status; }}")?;
    for entry in site.entries() {
        writeln!(text, "{}", location(site, entry, address)?)?;
    }
    if let Listen::Agents(_) = listen {
        for entry in site.entries() {
            let Some(short) = entry.path.strip_suffix('/') else { continue };
            // To Nova a path is the same with and without a slash at its end, and the agent asks without.
            if !short.is_empty() && site.entries().iter().all(|other| other.path != short) {
                let entry = PageEntry { path: short.to_owned(), ..entry.clone() };
                writeln!(text, "{}", location(site, &entry, address)?)?;
            }
        }
    }
    text.push_str("}\n}\n");
    Ok(text)
}

fn location(site: &PeerSite, entry: &PageEntry, address: &str) -> Result<String> {
    let PageEntry { path, method, status, content_type, shared, number } = entry;
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

// The peer pve-imds (github.com/wyattanderson/pve-imds), the metadata service for Proxmox VE: an AF_XDP socket, gVisor's
// TCP stack and Go's HTTP server for each tap.
//
// No package has it, so the user names the program. It reads `/etc/pve`, so it runs in a mount namespace with an `/etc`
// of its own. It makes its own documents of a VM's configuration: guests check their statuses and lengths only.

/// The name of the subject in tables and files.
pub(crate) const PVE_IMDS: &str = "pve-imds";
/// The paths that it serves as OpenStack's. It answers EC2's listing with nothing, so that cloud-init ends there.
const SERVED: [&str; 2] = ["/openstack", "/latest/meta-data/"];
/// Mounts the directory of `$1` as `/etc`, and then becomes the program.
const INSIDE: &str = r#"mount --bind "$1" /etc && shift && exec "$@""#;

/// The subject pve-imds.
pub(crate) struct PveImds {
    program: PathBuf,
    /// What it finds in `/etc`.
    etc: Option<TempDir>,
}

/// A running pve-imds.
struct PveImdsServing(Server);

impl PveImds {
    /// Describes a subject that runs `program`.
    pub(crate) fn new(program: &Path) -> Self {
        Self { program: program.to_owned(), etc: None }
    }
}

impl Subject for PveImds {
    fn name(&self) -> &'static str {
        PVE_IMDS
    }

    fn version(&self) -> Result<String> {
        Ok(self.program.display().to_string())
    }

    fn makes_its_own_documents(&self) -> bool {
        true
    }

    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()> {
        // It serves every tap that it finds, and would pay for those of larger cases too.
        let is_tap =
            |link: &&serde_json::Value| link["ifname"].as_str().is_some_and(|name| number(name).is_ok());
        let taps = scene.node.links()?.iter().filter(is_tap).count();
        ensure!(
            taps == scene.tenants.len(),
            "pve-imds serves all {taps} taps; use a run for each number of VMs"
        );
        let etc = tempfile::Builder::new().prefix("xdp-imds-storm-").tempdir()?;
        let pve = etc.path().join("pve");
        let machines = pve.join("qemu-server");
        std::fs::create_dir_all(&machines)?;
        for tenant in scene.tenants {
            let number = number(&tenant.tap)?;
            let file = machines.join(format!("{number}.conf"));
            std::fs::write(&file, pve_imds_configuration(number, tenant)?)
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
        std::fs::create_dir(pve.join("local"))?;
        // It does not start without the node's key, which signs identity tokens.
        let mut openssl = Command::new("openssl");
        openssl.args(["genrsa", "-out"]).arg(pve.join("local/pve-ssl.key")).arg("2048");
        support::netns::run(&mut openssl)?;
        self.etc = Some(etc);
        Ok(())
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>> {
        let etc = self.etc.as_ref().context("`prepare` was not called for pve-imds")?.path();
        // Each of these programs executes the next in its place, so the process id stays the same.
        let mut command = command("unshare", scene.pinned)?;
        command.args(["--mount", "--propagation", "private", "sh", "-c", INSIDE, "sh"]).arg(etc);
        command.arg(&self.program).args(["--emulate", "openstack", "--log_level", "warn"]);
        let log = etc.join("log");
        let ready = Answers::Attached(scene.tenants.len());
        Ok(Box::new(PveImdsServing(Server::start(PVE_IMDS, scene.node, &mut command, log, &ready)?)))
    }
}

impl Running for PveImdsServing {
    fn pids(&self) -> Vec<u32> {
        self.0.pids()
    }

    fn stop(self: Box<Self>) -> Result<()> {
        self.0.end()
    }
}

/// Returns the VM's number, which is part of its tap's name on Proxmox VE.
fn number(tap: &str) -> Result<u32> {
    let digits = tap.strip_prefix("tap").and_then(|rest| rest.strip_suffix("i0"));
    digits
        .and_then(|digits| digits.parse().ok())
        .with_context(|| format!("pve-imds serves taps with names like tap100i0, not {tap}"))
}

/// Returns a VM's configuration as Proxmox VE writes it, with the user-data in the notes.
fn pve_imds_configuration(number: u32, tenant: &Tenant) -> Result<String> {
    let is_served =
        |page: &PeerPage| page.method == "GET" && SERVED.iter().any(|path| page.path.starts_with(path));
    if let Some(page) = tenant.pages.iter().find(|page| !is_served(page)) {
        anyhow::bail!("pve-imds does not serve {} {}; use --dialect openstack-alone", page.method, page.path);
    }
    let user_data = tenant.pages.iter().find(|page| page.path.ends_with("/user_data"));
    let user_data = String::from_utf8(user_data.map(|page| page.body.to_vec()).unwrap_or_default())?;
    ensure!(!user_data.contains("-->"), "user-data with `-->` would end the comment that it is in");
    let mut text = String::new();
    for line in ["<!--#user-data"].into_iter().chain(user_data.lines()).chain(["-->"]) {
        writeln!(text, "#{}", line.replace('%', "%25").replace(':', "%3A"))?;
    }
    let mac = tenant.mac.to_string().to_uppercase();
    write!(
        text,
        "cores: 2\nmemory: 2048\nname: vm-{number}\nnet0: virtio={mac},bridge=vmbr0\nostype: l26\n\
         smbios1: uuid=00000000-0000-4000-8000-{number:012x}\n"
    )?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use metadata_common::mac::Mac;
    use std::net::Ipv4Addr;

    use super::super::{PeerPage, Tenant};
    use super::{number, pve_imds_configuration};

    fn tenant(method: &str, path: &str, body: &'static str) -> Tenant {
        let page = PeerPage {
            method: method.into(),
            path: path.into(),
            status: 200,
            content_type: String::new(),
            body: Bytes::from_static(body.as_bytes()),
        };
        Tenant {
            tap: "tap107i0".into(),
            mac: Mac([0xbc, 0x24, 0x11, 0, 0, 7]),
            address: Ipv4Addr::new(10, 0, 16, 7),
            pages: vec![page],
        }
    }

    #[test]
    fn a_vm_is_configured_as_on_proxmox_ve() {
        let tenant = tenant("GET", "/openstack/latest/user_data", "#cloud-config\nfqdn: \"100%\"\n");
        assert_eq!(
            pve_imds_configuration(107, &tenant).expect("a configuration"),
            "#<!--#user-data\n##cloud-config\n#fqdn%3A \"100%25\"\n#-->\n\
             cores: 2\nmemory: 2048\nname: vm-107\nnet0: virtio=BC:24:11:00:00:07,bridge=vmbr0\nostype: l26\n\
             smbios1: uuid=00000000-0000-4000-8000-00000000006b\n"
        );
    }

    #[test]
    fn requests_that_pve_imds_has_no_document_for_are_refused_before_the_start() {
        let refused = [
            ("GET", "/v1/user-data", "", "does not serve GET /v1/user-data"),
            ("PUT", "/latest/api/token", "", "does not serve PUT"),
            ("GET", "/latest/meta-data/", "", ""),
            ("GET", "/openstack/latest/user_data", "a --> b", "would end the comment"),
        ];
        for (method, path, body, says) in refused {
            let outcome = pve_imds_configuration(107, &tenant(method, path, body));
            let error = outcome.err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(error.is_empty(), says.is_empty(), "{path}: {error}");
            assert!(error.contains(says), "{path}: {error}");
        }
    }

    #[test]
    fn only_names_of_proxmox_ves_taps_have_a_vms_number() {
        assert_eq!(number("tap107i0").expect("a number"), 107);
        for tap in ["storm7", "tap107i1", "tapi0", "tap-1i0"] {
            assert!(number(tap).is_err(), "{tap}");
        }
    }
}
