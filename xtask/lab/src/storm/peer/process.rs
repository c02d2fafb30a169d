//! Starts a peer's servers inside a namespace, waits until they answer, and ends them.

use anyhow::{Context as _, Result, bail, ensure};
use shell::tools;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::eventually::eventually;
use support::netns::Namespace;
use support::process;

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
