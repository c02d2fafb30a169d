//! A peer's server processes: started inside a namespace, waited for until they answer, ended by their id.

use crate::shell;
use crate::tools;
use anyhow::{Context as _, Result, bail, ensure};
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::eventually::eventually;
use support::netns::Namespace;
use support::process;

/// Longest a server may take to answer; haproxy reads thousands of files first.
const START: Duration = Duration::from_secs(60);
/// Longest it may take to end before it is killed.
const END: Duration = Duration::from_secs(5);

/// A running server. Ended on drop, with the processes it started.
pub(super) struct Server {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

/// Where a server answers once it has started.
pub(super) enum Answers<'a> {
    /// On port 80 of an address of the namespace.
    At(Ipv4Addr),
    /// On a Unix socket.
    On(&'a Path),
}

impl Server {
    /// Starts `command` inside `ns`, with what it says going to `log`, and waits until it answers.
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
            }
            Ok(None)
        });
        match ready {
            Ok(None) => Ok(server),
            Ok(Some(status)) => bail!("{name} ended at once, {status}: {}", server.said()),
            Err(error) => Err(error.context(format!("{name} does not answer: {}", server.said()))),
        }
    }

    /// The server and the processes it started: those whose CPU time and memory are the peer's.
    pub(super) fn pids(&self) -> Vec<u32> {
        let own = self.child.id();
        let children =
            std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        std::iter::once(own).chain(children).collect()
    }

    /// Ends it and waits until it has ended.
    pub(super) fn end(mut self) -> Result<()> {
        self.terminate()
    }

    fn said(&self) -> String {
        let said = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last: Vec<_> = said.lines().rev().take(5).collect();
        last.into_iter().rev().collect::<Vec<_>>().join("; ")
    }

    fn terminate(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        let pids = self.pids();
        process::terminate(self.child.id())?;
        let ended = eventually(END, || {
            ensure!(self.child.try_wait()?.is_some(), "{} is still there", self.name);
            Ok(())
        });
        if ended.is_err() {
            // Children first: their parent has not been waited for, so their ids are still theirs.
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
            eprintln!("{} (process {}) stays behind: {error:#}", self.name, self.child.id());
        }
    }
}

/// A peer's program, on these cores alone if there are any.
pub(super) fn command(program: &str, pinned: Option<&[usize]>) -> Result<Command> {
    let file = shell::which(program).with_context(|| tools::missing_peers().unwrap_or_default())?;
    let Some(cores) = pinned else { return Ok(Command::new(file)) };
    let cores: Vec<_> = cores.iter().map(usize::to_string).collect();
    // taskset becomes the program: the process id stays.
    let mut command = Command::new("taskset");
    command.arg("--cpu-list").arg(cores.join(",")).arg(file);
    Ok(command)
}

/// What a program says its version is, in one line.
pub(super) fn version(program: &str, option: &str) -> Result<String> {
    let output = command(program, None)?.arg(option).stdin(Stdio::null()).output()?;
    // nginx says it on standard error.
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    let line = said.lines().next().with_context(|| format!("{program} {option} says nothing"))?;
    // haproxy adds where it comes from.
    Ok(line.split(" - ").next().unwrap_or(line).trim_start_matches("nginx version: ").to_owned())
}

/// Most descriptors a process may have here: what servers are told to use.
pub(super) fn descriptors() -> u32 {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    // Soft limit, hard limit, unit; "unlimited" is no number.
    let hard = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    hard.unwrap_or(1 << 20).min(1 << 20)
}
