//! The subjects of a storm, and the peers among them.

mod neutron;
mod servers;

#[cfg(test)]
mod tests;

/// What an OpenStack compute node has for its metadata agent.
pub(crate) use neutron::{ComputeNode, ComputeSite};
/// The name of the peer whose program the user names.
pub(crate) use servers::PVE_IMDS;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use metadata_common::mac::Mac;
use neutron::Neutron;
use servers::{Haproxy, Nginx, PveImds};
use shell::tools;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::eventually;
use support::guest::METADATA;
use support::netns::Namespace;
use tempfile::TempDir;

/// A guest as a subject sees it.
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) tap: String,
    pub(crate) mac: Mac,
    pub(crate) address: Ipv4Addr,
    pub(crate) pages: Vec<PeerPage>,
}
/// A request of the sequence and its answer.
#[derive(Clone, Debug)]
pub(crate) struct PeerPage {
    /// GET, or PUT for a token.
    pub(crate) method: String,
    /// The path. Guests replace [`OWN_MAC`] in it by their MAC.
    pub(crate) path: String,
    pub(crate) status: u16,
    pub(crate) content_type: String,
    /// The body, shared by guests with equal bodies.
    pub(crate) body: Bytes,
}

/// The placeholder for the guest's MAC in a page's path, in lower case with colons (EC2's
/// `network/interfaces/macs/<mac>/`). A guest that requests another guest's MAC need not get a correct answer.
pub(crate) const OWN_MAC: &str = "{mac}";

/// A subject of a storm, which serves the guests' pages on their taps. Subjects alternate in one run on the same taps.
/// The taps start in the node's namespace: up, and without bridge, program or address.
pub(crate) trait Subject {
    /// Returns the name in tables and files.
    fn name(&self) -> &'static str;

    /// Returns name and version of the measured program.
    fn version(&self) -> Result<String>;

    /// Does the work that is not repeated each round: writes documents and makes configurations.
    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()>;

    /// Whether its documents may differ from the agent's. Guests then check only the status and length of an answer.
    fn makes_its_own_documents(&self) -> bool {
        false
    }

    /// Serves on the taps; returns when all guests would get answers.
    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>>;
}

/// A disturbance of a server while guests boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disturbance {
    /// The server is killed and started again at once.
    Kill9,
    /// Another server takes over from it.
    TakeOver,
}

/// A running subject. Dropping it also stops it and frees the taps.
pub(crate) trait Running: Send {
    /// Returns the processes of the subject, for CPU time and memory.
    fn pids(&self) -> Vec<u32>;

    /// Returns the agent's run directory; `None` for other servers.
    fn run_directory(&self) -> Option<PathBuf> {
        None
    }

    /// Returns the process that signs identity tokens, if there is one. [`pids`](Self::pids) includes it.
    fn signer(&self) -> Option<u32> {
        None
    }

    /// Returns once the server has done what the requests so far cause it to do.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the number of requests that Nova has had, if there is one behind the server.
    fn asked_of_nova(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Returns the median time to attach one tap, if the server reports it.
    fn attached_in(&self) -> Option<Duration> {
        None
    }

    /// Disturbs the server while guests boot; returns when the disturbance is over.
    fn disturb(&mut self, what: Disturbance) -> Result<()> {
        anyhow::bail!("only xdp-imds supports {what:?}")
    }

    /// Ends the servers, and leaves the taps as they were before.
    fn stop(self: Box<Self>) -> Result<()>;
}

/// The names of all peers.
pub(crate) const PEERS: [&str; 5] = ["nginx", "haproxy", neutron::NEUTRON, neutron::NEUTRON_4, PVE_IMDS];
/// The names of those that ask Nova for each answer.
pub(crate) const ASKING: [&str; 2] = [neutron::NEUTRON, neutron::NEUTRON_4];

/// Returns the peer with this name. Peers with a proxy per network distribute the guests over `networks` networks.
/// `pve_imds` is the program of pve-imds; without it that peer is `None`.
pub(crate) fn named(name: &str, networks: usize, pve_imds: Option<&Path>) -> Option<Box<dyn Subject>> {
    match name {
        "nginx" => Some(Box::new(Nginx::default())),
        "haproxy" => Some(Box::new(Haproxy::new(networks))),
        neutron::NEUTRON => Some(Box::new(Neutron::new(neutron::NEUTRON, 2, networks))),
        neutron::NEUTRON_4 => Some(Box::new(Neutron::new(neutron::NEUTRON_4, 4, networks))),
        PVE_IMDS => Some(Box::new(PveImds::new(pve_imds?))),
        _ => None,
    }
}

/// The environment of a subject.
pub(crate) struct Scene<'a> {
    /// The node, whose namespace has the taps.
    pub(crate) node: &'a Namespace,
    /// The guests.
    pub(crate) tenants: &'a [Tenant],
    /// Number of cores that a server may use.
    pub(crate) cores: usize,
    /// The cores that a server is pinned to, if it is pinned.
    pub(crate) pinned: Option<&'a [usize]>,
}

// Starts a peer's servers inside a namespace, waits until they answer, and ends them.

/// The longest time until a server answers. haproxy reads thousands of files first.
const START: Duration = Duration::from_secs(60);
/// The longest time until a server ends. After it the server is killed.
const END: Duration = Duration::from_secs(5);

/// A running server. Dropping it ends it and the processes it started.
struct Server {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

/// Where a started server answers.
enum Answers<'a> {
    /// At an address in the namespace.
    At(SocketAddr),
    /// On a Unix socket.
    On(&'a Path),
    /// On its devices: it is ready once this many of them have an XDP program.
    Attached(usize),
}

impl Server {
    /// Starts `command` inside `ns` with its output in `log`, and waits until it answers.
    fn start(
        name: &'static str,
        ns: &Namespace,
        command: &mut Command,
        log: PathBuf,
        answers: &Answers<'_>,
    ) -> Result<Self> {
        let file = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let mut server = Self { name, child: ns.spawn(command)?, log };
        let ready = eventually(START, || {
            if let Some(status) = server.child.try_wait()? {
                return Ok(Some(status));
            }
            match answers {
                Answers::At(address) => {
                    ns.run_in(|| TcpStream::connect_timeout(address, Duration::from_secs(1))).map(drop)?;
                }
                Answers::On(path) => UnixStream::connect(path).map(drop)?,
                Answers::Attached(devices) => {
                    let attached = ns.links()?.iter().filter(|link| !link["xdp"].is_null()).count();
                    ensure!(attached >= *devices, "{attached} of {devices} devices have an XDP program");
                }
            }
            Ok(None)
        });
        match ready {
            Ok(None) => Ok(server),
            Ok(Some(status)) => bail!("{name} ended at once, {status}: {}", server.last_output()),
            Err(error) => Err(error.context(format!("{name} does not answer: {}", server.last_output()))),
        }
    }

    /// Returns the server and the processes it started, for CPU time and memory.
    fn pids(&self) -> Vec<u32> {
        let own = self.child.id();
        let children =
            std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        std::iter::once(own).chain(children).collect()
    }

    /// Ends the server and waits for its end.
    fn end(mut self) -> Result<()> {
        self.terminate()
    }

    fn last_output(&self) -> String {
        let output = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last: Vec<_> = output.lines().rev().take(5).collect();
        last.into_iter().rev().collect::<Vec<_>>().join("; ")
    }

    fn terminate(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        let pids = self.pids();
        support::process::terminate(self.child.id())?;
        let ended = eventually(END, || {
            ensure!(self.child.try_wait()?.is_some(), "{} has not ended", self.name);
            Ok(())
        });
        if ended.is_err() {
            // Children are ended first. Their parent has not been reaped, so their ids cannot belong to other processes
            // yet.
            for &pid in pids.iter().skip(1) {
                let _ = support::process::terminate(pid);
            }
            self.child.kill()?;
            self.child.wait()?;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.terminate() {
            eprintln!("{} (process {}) cannot be ended: {error:#}", self.name, self.child.id());
        }
    }
}

/// Returns the command of a peer's program, pinned to these cores if there are any.
fn command(program: &str, cores: Option<&[usize]>) -> Result<Command> {
    let file = shell::which(program).with_context(|| tools::missing_peers().unwrap_or_default())?;
    Ok(pinned(&file, cores))
}

/// Returns the command of a program, pinned to these cores if there are any.
pub(crate) fn pinned(program: &Path, cores: Option<&[usize]>) -> Command {
    let Some(cores) = cores else { return Command::new(program) };
    let cores: Vec<_> = cores.iter().map(usize::to_string).collect();
    // taskset executes the program in its place, so the process id stays the same.
    let mut command = Command::new("taskset");
    command.arg("--cpu-list").arg(cores.join(",")).arg(program);
    command
}

/// Returns the version that a program prints, in one line.
fn version(program: &str, option: &str) -> Result<String> {
    let output = command(program, None)?.arg(option).stdin(Stdio::null()).output()?;
    // nginx prints it on standard error.
    let output =
        [output.stdout, output.stderr].map(|part| String::from_utf8_lossy(&part).into_owned()).concat();
    let line = output.lines().next().with_context(|| format!("{program} {option} prints nothing"))?;
    // haproxy appends its origin.
    Ok(line.split(" - ").next().unwrap_or(line).trim_start_matches("nginx version: ").to_owned())
}

/// Returns the most descriptors that a process may have here, for the servers' configurations.
fn descriptors() -> u32 {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    // Soft limit, hard limit, unit. "unlimited" is not a number.
    let hard = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    hard.unwrap_or(1 << 20).min(1 << 20)
}

// The files that a peer serves: the same bytes as the agent's, written once for all servers.
//
// A document that all guests share is stored once. Of the other documents each guest has its own file,
// `<directory>/<address>/<number of the document>`, on a file system in memory.

/// Makes a directory for files, so that reading them needs no disk.
pub(crate) fn in_memory() -> Result<TempDir> {
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    Ok(tempfile::Builder::new().prefix("xdp-imds-lab-").tempdir_in(base)?)
}

/// The directory of documents that all guests share.
const SHARED: &str = "all";

/// A path and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PageEntry {
    /// The path, which may contain [`OWN_MAC`].
    path: String,
    method: String,
    status: u16,
    content_type: String,
    /// The number of the document, which is its file's name.
    number: usize,
    /// The body, if it is the same for every guest.
    shared: Option<Bytes>,
}

/// The files of all guests, and the paths that they answer.
struct PeerSite {
    directory: TempDir,
    entries: Vec<PageEntry>,
    guests: Vec<(String, Mac)>,
    largest: usize,
}

impl PeerSite {
    /// Writes the pages of all tenants.
    ///
    /// # Errors
    /// Fails if guests differ in more than their bodies, or if files cannot be written.
    fn lay_out(tenants: &[Tenant]) -> Result<Self> {
        let directory = in_memory()?;
        let first = tenants.first().context("the storm has no guest")?;
        let mut entries = Vec::new();
        let mut numbers = HashMap::new();
        for (number, page) in first.pages.iter().enumerate() {
            // Clients request some paths twice. Those are one entry if their answers are equal.
            if let Some(earlier) = numbers.insert(page.path.as_str(), page) {
                ensure!(
                    (&earlier.method, earlier.status, &earlier.body)
                        == (&page.method, page.status, &page.body),
                    "{} has two different answers; a peer can give only one",
                    page.path
                );
                continue;
            }
            entries.push(entry(number, page, tenants)?);
        }
        let site = Self {
            guests: tenants.iter().map(|tenant| (tenant.address.to_string(), tenant.mac)).collect(),
            largest: tenants.iter().flat_map(|t| &t.pages).map(|page| page.body.len()).max().unwrap_or(0),
            directory,
            entries,
        };
        site.write(tenants)?;
        Ok(site)
    }

    fn write(&self, tenants: &[Tenant]) -> Result<()> {
        let write = |path: PathBuf, body: &[u8]| {
            std::fs::write(&path, body).with_context(|| format!("cannot write {}", path.display()))
        };
        std::fs::create_dir(self.directory.path().join(SHARED))?;
        for entry in &self.entries {
            if let Some(body) = &entry.shared {
                write(self.file(SHARED, entry), body)?;
            }
        }
        for (tenant, (address, _)) in tenants.iter().zip(&self.guests) {
            std::fs::create_dir(self.directory.path().join(address))?;
            for entry in self.entries.iter().filter(|entry| entry.shared.is_none()) {
                write(self.file(address, entry), &tenant.pages[entry.number].body)?;
            }
        }
        Ok(())
    }

    /// Returns the directory of all files. Sockets and configurations may be added to it.
    fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns every path, in the order of the first guest's pages.
    fn entries(&self) -> &[PageEntry] {
        &self.entries
    }

    /// Returns the guests: the address, which names the directory, and the MAC.
    fn guests(&self) -> &[(String, Mac)] {
        &self.guests
    }

    /// Returns the bytes of the largest body.
    fn largest(&self) -> usize {
        self.largest
    }

    /// Returns the number of files.
    fn files(&self) -> usize {
        let shared = self.entries.iter().filter(|entry| entry.shared.is_some()).count();
        shared + (self.entries.len() - shared) * self.guests.len()
    }

    /// Returns the file that answers `entry` for the guest at this address, or for all guests.
    fn file(&self, address: &str, entry: &PageEntry) -> PathBuf {
        let directory = if entry.shared.is_some() { SHARED } else { address };
        self.directory.path().join(directory).join(entry.number.to_string())
    }
}

/// Returns the entry of one page, after checking that every guest has the page.
fn entry(number: usize, page: &PeerPage, tenants: &[Tenant]) -> Result<PageEntry> {
    let PeerPage { method, path, status, content_type, body } = page;
    // Paths are written into configurations, so no character in them may end a word or a line.
    let plain = path.replace(OWN_MAC, "");
    ensure!(
        plain.starts_with('/') && plain.bytes().all(|o| o.is_ascii_alphanumeric() || b"/-._~:@".contains(&o)),
        "the path {path} cannot be written in a peer's configuration"
    );
    for tenant in tenants {
        let same = tenant
            .pages
            .get(number)
            .is_some_and(|other| (&other.method, &other.path, other.status) == (method, path, *status));
        ensure!(same, "{path}: the answer of {} differs from the first guest's", tenant.tap);
    }
    let shared = tenants.iter().all(|tenant| tenant.pages[number].body == *body);
    // An answer that is not a file is written into the configuration, once for all guests.
    ensure!(
        shared || *status == 200,
        "{path}: a guest's own body with status {status} cannot be served from a file"
    );
    Ok(PageEntry {
        path: path.clone(),
        method: method.clone(),
        status: *status,
        content_type: content_type.clone(),
        number,
        shared: shared.then(|| body.clone()),
    })
}

// Connects guests' taps and a peer's listener by kernel bridges.
//
// The bridges are set up as a careful operator would do it, so that the peer is measured and not a mistake. A guest's
// broadcasts are not flooded to a thousand others. Neighbour entries are permanent, as an SDN controller sets them.
// They are therefore exempt from the kernel's limits of the neighbour table, which hold for the whole machine.

/// The most ports of one bridge. The kernel numbers ports with 10 bits (net/bridge/br_private.h, BR_PORT_BITS).
const MAX_PORTS: usize = 1_000;
/// The most connections that may wait for a server to accept them; more than there are guests.
const BACKLOG: &str = "65535";
/// A network's end of the veth pair, inside its namespace.
const UPLINK: &str = "eth0";

/// Bridges with guests' taps on them. [`Networks::remove`] or a drop deletes them; the taps stay.
struct Networks<'a> {
    node: &'a Namespace,
    /// Bridges, and veth pairs to namespaces.
    links: Vec<String>,
    /// One namespace per bridge, if each network has its own listener.
    namespaces: Vec<Namespace>,
}

/// Distributes the guests over networks in equal shares, in order.
fn shares(guests: usize, networks: usize) -> Result<Vec<std::ops::Range<usize>>> {
    ensure!(networks >= 1, "expected at least one network");
    let networks = networks.min(guests.max(1));
    let most = guests.div_ceil(networks);
    ensure!(
        most <= MAX_PORTS,
        "{networks} networks have {most} guests each, but a bridge has at most {MAX_PORTS} ports; use at least {} \
         networks",
        guests.div_ceil(MAX_PORTS)
    );
    Ok((0..networks).map(|n| n * guests / networks..(n + 1) * guests / networks).collect())
}

impl<'a> Networks<'a> {
    /// Makes as few bridges as can hold all guests, each with the metadata address itself, for one server on the node.
    fn on_node(node: &'a Namespace, tenants: &[Tenant]) -> Result<Self> {
        allow_backlog(node)?;
        let mut made = Self { node, links: Vec::new(), namespaces: Vec::new() };
        for (number, share) in
            shares(tenants.len(), tenants.len().div_ceil(MAX_PORTS).max(1))?.into_iter().enumerate()
        {
            let bridge = bridge_name(number);
            node.ip_batch(
                &(bridge_lines(&bridge, number) + &address_lines(&bridge, &tenants[share.clone()])),
            )?;
            made.links.push(bridge.clone());
            node.ip_batch(&enslave_lines(&bridge, &tenants[share]))?;
        }
        Ok(made)
    }

    /// Makes one bridge per network, each connected to a namespace that has the metadata address, for one server each.
    fn apart(node: &'a Namespace, tenants: &[Tenant], networks: usize) -> Result<Self> {
        let mut made = Self { node, links: Vec::new(), namespaces: Vec::new() };
        for (number, share) in shares(tenants.len(), networks)?.into_iter().enumerate() {
            let (bridge, cable) = (bridge_name(number), format!("stormup{number}"));
            let inside = Namespace::new("storm-net")?;
            allow_backlog(&inside)?;
            let mut lines = bridge_lines(&bridge, number);
            writeln!(lines, "link add {cable} type veth peer name {UPLINK} netns {}", inside.name())?;
            writeln!(lines, "link set {cable} master {bridge} up")?;
            node.ip_batch(&lines)?;
            made.links.extend([cable, bridge.clone()]);
            let tenants = &tenants[share];
            inside.ip_batch(&format!("link set {UPLINK} up\n{}", address_lines(UPLINK, tenants)))?;
            made.namespaces.push(inside);
            node.ip_batch(&enslave_lines(&bridge, tenants))?;
        }
        Ok(made)
    }

    /// Makes one bridge per network, to which [`plug`](Self::plug) connects what serves it.
    fn awaiting(node: &'a Namespace, tenants: &[Tenant], networks: usize) -> Result<Self> {
        let mut made = Self { node, links: Vec::new(), namespaces: Vec::new() };
        for (number, share) in shares(tenants.len(), networks)?.into_iter().enumerate() {
            let bridge = bridge_name(number);
            node.ip_batch(&bridge_lines(&bridge, number))?;
            made.links.push(bridge.clone());
            node.ip_batch(&enslave_lines(&bridge, &tenants[share]))?;
        }
        Ok(made)
    }

    /// Connects a device of the node to a network.
    fn plug(&self, number: usize, device: &str) -> Result<()> {
        self.node.ip(&format!("link set {device} master {} up", bridge_name(number))).map(drop)
    }

    /// Returns the networks' namespaces, if each network has one.
    fn namespaces(&self) -> &[Namespace] {
        &self.namespaces
    }

    /// Deletes the bridges; the kernel frees the taps on them. The servers must have ended.
    fn remove(mut self) -> Result<()> {
        self.take_away()
    }

    fn take_away(&mut self) -> Result<()> {
        // The veth pairs are deleted too, because a removed namespace deletes its end only some time later.
        let lines: String = self.links.drain(..).map(|link| format!("link del {link}\n")).collect();
        if lines.is_empty() {
            return Ok(());
        }
        self.node.ip_batch(&lines).context("cannot delete a peer's bridges")
    }
}

impl Drop for Networks<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.take_away() {
            eprintln!("{error:#}");
        }
    }
}

/// Raises the limits of connections that wait for a listener.
fn allow_backlog(ns: &Namespace) -> Result<()> {
    ns.sysctl("core/somaxconn", BACKLOG)?;
    ns.sysctl("ipv4/tcp_max_syn_backlog", BACKLOG)
}

fn bridge_name(number: usize) -> String {
    format!("stormbr{number}")
}

fn bridge_lines(bridge: &str, number: usize) -> String {
    // A bridge without a MAC of its own uses a port's. That MAC would change when the port is removed, and guests would
    // keep using the old one.
    let [high, low] = u16::try_from(number).unwrap_or(u16::MAX).to_be_bytes();
    format!(
        "link add {bridge} address 02:00:a9:fe:{high:02x}:{low:02x} type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n\
         link set {bridge} up\n"
    )
}

fn address_lines(device: &str, tenants: &[Tenant]) -> String {
    let mut lines = format!("addr add {METADATA}/32 dev {device}\n") + &neighbour_lines(device, tenants);
    for Tenant { address, .. } in tenants {
        let _ = writeln!(lines, "route add {address}/32 dev {device}");
    }
    lines
}

fn neighbour_lines(device: &str, tenants: &[Tenant]) -> String {
    let mut lines = String::new();
    for Tenant { address, mac, .. } in tenants {
        let _ = writeln!(lines, "neigh replace {address} lladdr {mac} dev {device} nud permanent");
    }
    lines
}

fn enslave_lines(bridge: &str, tenants: &[Tenant]) -> String {
    let mut lines = String::new();
    for Tenant { tap, .. } in tenants {
        let _ = writeln!(lines, "link set {tap} master {bridge} up");
        let _ = writeln!(
            lines,
            "link set {tap} type bridge_slave isolated on flood off mcast_flood off bcast_flood off"
        );
    }
    lines
}
