//! Starts a peer's servers inside a namespace, waits until they answer, and ends them.

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use metadata_common::mac::Mac;
use shell::tools;
use std::collections::HashMap;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::eventually::eventually;
use support::netns::Namespace;
use support::process;
use tempfile::TempDir;

use super::{OWN_MAC, Page, Tenant};

/// The longest time until a server answers. haproxy reads thousands of files first.
const START: Duration = Duration::from_secs(60);
/// The longest time until a server ends. After it the server is killed.
const END: Duration = Duration::from_secs(5);

/// A running server. Dropping it ends it and the processes it started.
pub(super) struct Server {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

/// Where a started server answers.
pub(super) enum Answers<'a> {
    /// On port 80 of an address in the namespace.
    At(Ipv4Addr),
    /// On a Unix socket.
    On(&'a Path),
    /// On its devices: it is ready once this many of them have an XDP program.
    Attached(usize),
}

impl Server {
    /// Starts `command` inside `ns` with its output in `log`, and waits until it answers.
    pub(super) fn start(
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
                    let to = SocketAddr::from((*address, 80));
                    ns.run_in(|| TcpStream::connect_timeout(&to, Duration::from_secs(1))).map(drop)?;
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
    pub(super) fn pids(&self) -> Vec<u32> {
        let own = self.child.id();
        let children =
            std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        std::iter::once(own).chain(children).collect()
    }

    /// Ends the server and waits for its end.
    pub(super) fn end(mut self) -> Result<()> {
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
        process::terminate(self.child.id())?;
        let ended = eventually(END, || {
            ensure!(self.child.try_wait()?.is_some(), "{} has not ended", self.name);
            Ok(())
        });
        if ended.is_err() {
            // Children are ended first. Their parent has not been reaped, so their ids cannot belong to other processes
            // yet.
            for &pid in pids.iter().skip(1) {
                let _ = process::terminate(pid);
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
pub(super) fn command(program: &str, pinned: Option<&[usize]>) -> Result<Command> {
    let file = shell::which(program).with_context(|| tools::missing_peers().unwrap_or_default())?;
    let Some(cores) = pinned else { return Ok(Command::new(file)) };
    let cores: Vec<_> = cores.iter().map(usize::to_string).collect();
    // taskset executes the program in its place, so the process id stays the same.
    let mut command = Command::new("taskset");
    command.arg("--cpu-list").arg(cores.join(",")).arg(file);
    Ok(command)
}

/// Returns the version that a program prints, in one line.
pub(super) fn version(program: &str, option: &str) -> Result<String> {
    let output = command(program, None)?.arg(option).stdin(Stdio::null()).output()?;
    // nginx prints it on standard error.
    let output =
        [output.stdout, output.stderr].map(|part| String::from_utf8_lossy(&part).into_owned()).concat();
    let line = output.lines().next().with_context(|| format!("{program} {option} prints nothing"))?;
    // haproxy appends its origin.
    Ok(line.split(" - ").next().unwrap_or(line).trim_start_matches("nginx version: ").to_owned())
}

/// Returns the most descriptors that a process may have here, for the servers' configurations.
pub(super) fn descriptors() -> u32 {
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

/// The directory for files, so that reading them needs no disk.
const IN_MEMORY: &str = "/dev/shm";
/// The directory of documents that all guests share.
const SHARED: &str = "all";

/// A path and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The path, which may contain [`OWN_MAC`].
    pub(super) path: String,
    pub(super) method: String,
    pub(super) status: u16,
    pub(super) content_type: String,
    /// The number of the document, which is its file's name.
    pub(super) number: usize,
    /// The body, if it is the same for every guest.
    pub(super) shared: Option<Bytes>,
}

/// The files of all guests, and the paths that they answer.
pub(super) struct Site {
    directory: TempDir,
    entries: Vec<Entry>,
    guests: Vec<(String, Mac)>,
    largest: usize,
}

impl Site {
    /// Writes the pages of all tenants.
    ///
    /// # Errors
    /// Fails if guests differ in more than their bodies, or if files cannot be written.
    pub(super) fn lay_out(tenants: &[Tenant]) -> Result<Self> {
        let base =
            if Path::new(IN_MEMORY).is_dir() { PathBuf::from(IN_MEMORY) } else { std::env::temp_dir() };
        let directory = tempfile::Builder::new().prefix("xdp-imds-storm-").tempdir_in(base)?;
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
    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns every path, in the order of the first guest's pages.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the guests: the address, which names the directory, and the MAC.
    pub(super) fn guests(&self) -> &[(String, Mac)] {
        &self.guests
    }

    /// Returns the bytes of the largest body.
    pub(super) fn largest(&self) -> usize {
        self.largest
    }

    /// Returns the number of files.
    pub(super) fn files(&self) -> usize {
        let shared = self.entries.iter().filter(|entry| entry.shared.is_some()).count();
        shared + (self.entries.len() - shared) * self.guests.len()
    }

    /// Returns the file that answers `entry` for the guest at this address, or for all guests.
    pub(super) fn file(&self, address: &str, entry: &Entry) -> PathBuf {
        let directory = if entry.shared.is_some() { SHARED } else { address };
        self.directory.path().join(directory).join(entry.number.to_string())
    }
}

/// Returns the entry of one page, after checking that every guest has the page.
fn entry(number: usize, page: &Page, tenants: &[Tenant]) -> Result<Entry> {
    let Page { method, path, status, content_type, body } = page;
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
    Ok(Entry {
        path: path.clone(),
        method: method.clone(),
        status: *status,
        content_type: content_type.clone(),
        number,
        shared: shared.then(|| body.clone()),
    })
}
