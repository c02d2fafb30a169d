//! The real agent in a host namespace. Tests control it like an operator, by command line and signals. They observe its
//! standard error and metrics.

use crate::eventually;
use crate::guest::METADATA;
use crate::netns::Namespace;
use crate::process;
use anyhow::{Context as _, Error, Result, bail, ensure};
use metadata_common::mac::Mac;
use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Limit from the agent's start to its `serving` line.
pub const START_PATIENCE: Duration = Duration::from_secs(60);
/// Limit for the agent's stop after SIGTERM.
pub const STOP_PATIENCE: Duration = Duration::from_secs(10);
/// Limit until a line arrives from the agent's standard error.
const SAYS_WITHIN: Duration = Duration::from_secs(5);
/// Limit for one request for the metrics.
const METRICS_PATIENCE: Duration = Duration::from_secs(5);
/// Address of the agent's metrics, inside its namespace.
pub const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9_253);
/// Number of lines of standard error to keep. They explain a failure.
const KEPT_LINES: usize = 2_000;

/// Verdicts of frames steered to the agent.
pub const STEERED: &str = "steer_";
/// Verdicts of frames that the kernel answers instead of the agent.
pub const ANSWERED: &str = "answer_";
/// Verdicts of frames that the kernel consumes instead of the agent.
pub const ABSORBED: &str = "absorb_";
/// Verdicts of frames that pass, because they do not concern the agent.
pub const PASSED: &str = "pass_";
/// Verdicts of frames that a port drops.
pub const DROPPED: &str = "drop_";
/// The verdict of a frame for a metadata address whose source MAC is not the port's.
pub const IMPOSTOR: &str = "drop_unknown_mac";

/// Path of the agent built beside the running program, in Cargo's layout `target/<profile>/`.
///
/// # Errors
/// Fails if the agent is not built, or was built from sources other than the running program. The error names the
/// remedy.
pub fn binary() -> Result<PathBuf> {
    static CHECKED: OnceLock<std::result::Result<PathBuf, String>> = OnceLock::new();
    let checked = CHECKED.get_or_init(|| {
        let path = default_path().map_err(|error| format!("{error:#}"))?;
        fresh(&path).map_err(|error| format!("{error:#}"))?;
        Ok(path)
    });
    checked.clone().map_err(Error::msg)
}

/// Path of an agent built with the profile of the running program.
fn default_path() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the running program's own file")?;
    let directory = own.parent().context("the running program has no directory")?;
    let profile = if directory.ends_with("deps") { directory.parent() } else { Some(directory) };
    Ok(profile.context("target/ has no profile directory")?.join("xdp-imds"))
}

/// What an agent of the sources that this program was built from prints as its version.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (build ", env!("XDP_IMDS_BUILD_ID"), ")");

/// Checks by build id that the agent and the running program come from the same sources.
///
/// # Errors
/// Fails if there is no such program, or it prints another build id. The error names the remedy.
pub fn fresh(binary: &Path) -> Result<()> {
    let remedy = remedy(binary);
    ensure!(binary.is_file(), "the agent is not built: no {}; run `{remedy}`", binary.display());
    let output = Command::new(binary).arg("--version").stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {}", binary.display()))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    ensure!(
        printed.trim() == format!("xdp-imds {VERSION}"),
        "the agent is stale: {} is `{}`, but the sources are build {}; run `{remedy}`",
        binary.display(),
        printed.trim(),
        env!("XDP_IMDS_BUILD_ID")
    );
    Ok(())
}

/// The command that builds the agent at this path.
fn remedy(binary: &Path) -> String {
    const BUILD: &str = "cargo build -p metadata-user --bin xdp-imds";
    let directory = binary.parent().and_then(Path::file_name).unwrap_or_default();
    match directory.to_str() {
        None | Some("debug") => BUILD.into(),
        Some(profile) => format!("{BUILD} --profile {profile}"),
    }
}

/// A port in the form of the command line: `IFNAME[@NETNS][=MAC]`.
#[derive(Clone, Debug)]
pub struct PortArgument {
    /// The tap.
    pub ifname: String,
    /// Its namespace, if not the agent's.
    pub netns: Option<String>,
    /// The only MAC served on it.
    pub mac: Option<Mac>,
}

impl PortArgument {
    /// A tap in the agent's namespace, and its guest's MAC.
    #[must_use]
    pub fn new(ifname: impl Into<String>, mac: Mac) -> Self {
        Self { ifname: ifname.into(), netns: None, mac: Some(mac) }
    }

    /// The same port in another namespace.
    #[must_use]
    pub fn within(mut self, ns: &Namespace) -> Self {
        self.netns = Some(ns.name().to_owned());
        self
    }
}

impl fmt::Display for PortArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.ifname)?;
        if let Some(netns) = &self.netns {
            write!(f, "@{netns}")?;
        }
        self.mac.map_or(Ok(()), |mac| write!(f, "={mac}"))
    }
}

/// Arguments to serve these records on these ports.
#[must_use]
pub fn arguments(records: &Path, ports: &[PortArgument]) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["serve".into(), "--records".into(), records.into()];
    // Both are in the records' directory: a restarted agent finds them, and they are removed with the records.
    words.extend(["--state".into(), records.join("state").into()]);
    words.extend(["--run".into(), records.join("run").into(), "--no-pins".into()]);
    words.extend(["--metrics".into(), METRICS.to_string().into()]);
    for port in ports {
        words.extend(["--port".into(), port.to_string().into()]);
    }
    words
}

/// Like [`arguments`], for an agent that pins its links and maps.
#[must_use]
pub fn arguments_with_pins(records: &Path, ports: &[PortArgument], pins: &Path) -> Vec<OsString> {
    let mut words = arguments(records, ports);
    words.retain(|word| word != "--no-pins");
    words.extend(["--pins".into(), pins.into()]);
    words
}

/// A running agent. Stopped on drop.
#[derive(Debug)]
pub struct Agent<'a> {
    ns: &'a Namespace,
    child: Child,
    said: Arc<Mutex<Vec<String>>>,
}

impl<'a> Agent<'a> {
    /// Starts the agent built beside the running program and waits until it serves.
    ///
    /// # Errors
    /// Fails if it is not built, cannot start, ends early, or does not serve within [`START_PATIENCE`]. The error
    /// contains its log.
    pub fn start(ns: &'a Namespace, records: &Path, ports: &[PortArgument]) -> Result<Self> {
        Self::start_binary(&binary()?, ns, arguments(records, ports))
    }

    /// Starts a binary with arguments and waits until it serves.
    ///
    /// # Errors
    /// Like [`Agent::start`].
    pub fn start_binary(binary: &Path, ns: &'a Namespace, words: Vec<OsString>) -> Result<Self> {
        let mut command = Command::new(binary);
        command.args(&words).env("NO_COLOR", "1");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = ns.spawn(&mut command)?;
        let stderr = child.stderr.take().context("standard error is piped")?;
        let said = Arc::new(Mutex::new(Vec::new()));
        let (ready, serving) = channel();
        let kept = Arc::clone(&said);
        std::thread::Builder::new().name("agent-log".into()).spawn(move || read_log(stderr, &kept, ready))?;
        let mut agent = Self { ns, child, said };
        match serving.recv_timeout(START_PATIENCE) {
            Ok(()) => Ok(agent),
            Err(RecvTimeoutError::Disconnected) => {
                let status = agent.child.wait()?;
                bail!("the agent ended ({status}) instead of serving:\n{}", agent.log())
            }
            Err(RecvTimeoutError::Timeout) => {
                bail!("the agent does not serve after {START_PATIENCE:?}:\n{}", agent.log())
            }
        }
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns true if the log contains `text`. Waits for it up to 5 s, because a line can appear after its event.
    #[must_use]
    pub fn eventually_logs(&self, text: &str) -> bool {
        let has_said = || {
            ensure!(self.log().contains(text));
            Ok(())
        };
        eventually(SAYS_WITHIN, has_said).is_ok()
    }

    /// Its standard error so far, up to the first 2,000 lines.
    #[must_use]
    pub fn log(&self) -> String {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }

    /// Kills the agent by SIGKILL, so that it cannot clean up, as after a crash.
    ///
    /// # Errors
    /// Fails if it has already ended.
    pub fn kill(mut self) -> Result<()> {
        ensure!(self.child.try_wait()?.is_none(), "the agent has already ended:\n{}", self.log());
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Sends SIGTERM and waits until the agent ends.
    ///
    /// # Errors
    /// Fails if it still runs after [`STOP_PATIENCE`].
    pub fn stop(mut self) -> Result<ExitStatus> {
        let status = self.terminate()?;
        status.with_context(|| {
            format!("the agent does not stop {STOP_PATIENCE:?} after SIGTERM:\n{}", self.log())
        })
    }

    /// Waits until the agent ends, without a signal to it. Returns its status and its log.
    ///
    /// # Errors
    /// Fails if it still runs after `patience`.
    pub fn ended(mut self, patience: Duration) -> Result<(ExitStatus, String)> {
        let end = Instant::now() + patience;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait()? {
                return Ok((status, self.log()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        bail!("the agent does not end within {patience:?}:\n{}", self.log())
    }

    /// Sends SIGHUP, on which it reloads its configuration.
    ///
    /// # Errors
    /// Fails if it has ended.
    pub fn reload(&mut self) -> Result<()> {
        ensure!(self.child.try_wait()?.is_none(), "the agent has already ended:\n{}", self.log());
        Ok(process::hang_up(self.child.id())?)
    }

    /// Reads the metrics.
    ///
    /// # Errors
    /// Fails if the agent does not answer within a few seconds.
    pub fn metrics(&self) -> Result<Metrics> {
        Metrics::of(self.ns).with_context(|| format!("the agent's log:\n{}", self.log()))
    }

    /// Sends `GET path` to the metrics address; returns status and body.
    ///
    /// # Errors
    /// Fails if no answer arrives within a few seconds.
    pub fn ask(&self, path: &str) -> Result<(u16, String)> {
        let answer = self.ns.run_in(|| ask(METRICS, path))?;
        let (head, body) = answer.split_once("\r\n\r\n").context("the answer has no head")?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok((status.context("the answer has no status")?, body.to_owned()))
    }

    fn terminate(&mut self) -> Result<Option<ExitStatus>> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(Some(status));
        }
        process::terminate(self.child.id()).context("cannot signal the agent")?;
        let end = Instant::now() + STOP_PATIENCE;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(None)
    }
}

impl Drop for Agent<'_> {
    fn drop(&mut self) {
        if !matches!(self.terminate(), Ok(Some(_))) {
            eprintln!("the agent did not stop after SIGTERM and is killed");
            let killed = self.child.kill().and_then(|()| self.child.wait());
            if let Err(error) = killed {
                eprintln!("cannot end agent {}: {error}", self.child.id());
            }
        }
        if std::thread::panicking() {
            eprintln!("--- the agent's log ---\n{}\n---", self.log());
        }
    }
}

fn read_log(stderr: ChildStderr, kept: &Mutex<Vec<String>>, ready: Sender<()>) {
    let mut ready = Some(ready);
    for line in BufReader::new(stderr).lines().map_while(std::io::Result::ok) {
        let serving = line.contains("serving ports=");
        {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() < KEPT_LINES {
                kept.push(line);
            }
        }
        if serving && let Some(ready) = ready.take() {
            // After a failed start the channel has no receiver. The line is kept in any case.
            ready.send(()).unwrap_or_default();
        }
    }
}

/// Sends one GET, which must be answered with 200; returns the body.
fn get(address: SocketAddr, path: &str) -> Result<String> {
    let answer = ask(address, path)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer has no head")?;
    ensure!(head.split(' ').nth(1) == Some("200"), "answered {}", head.lines().next().unwrap_or_default());
    Ok(body.to_owned())
}

/// Sends one GET in this thread's namespace; returns the whole answer.
fn ask(address: SocketAddr, path: &str) -> Result<String> {
    // A wrong address must not make this thread request metadata from the machine's own network.
    ensure!(address.ip() != METADATA, "only guests ask {METADATA}");
    let mut stream = TcpStream::connect_timeout(&address, METRICS_PATIENCE)?;
    stream.set_read_timeout(Some(METRICS_PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// The agent's metrics at one moment (Prometheus text format 0.0.4).
#[derive(Clone, Debug)]
pub struct Metrics {
    samples: Vec<Sample>,
}

/// One sample line.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Name of the metric.
    pub name: String,
    /// Labels in their original order.
    pub labels: Vec<(String, String)>,
    /// The value.
    pub value: f64,
}

impl Sample {
    /// The value of one label.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn parse(line: &str) -> Option<Self> {
        let (series, value) = line.rsplit_once(' ')?;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.trim_end_matches('}').split_terminator(',').filter_map(|pair| {
            let (key, value) = pair.split_once('=')?;
            Some((key.to_owned(), value.trim_matches('"').to_owned()))
        });
        Some(Self { name: name.to_owned(), labels: labels.collect(), value: value.parse().ok()? })
    }
}

impl Metrics {
    /// Reads the metrics of the agent in a namespace.
    ///
    /// # Errors
    /// Fails if the agent does not answer within a few seconds.
    pub fn of(ns: &Namespace) -> Result<Self> {
        let text = ns.run_in(|| get(METRICS, "/metrics"));
        Ok(Self::parse(&text.with_context(|| format!("no metrics from {METRICS}"))?))
    }

    fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self { samples: lines.filter_map(Sample::parse).collect() }
    }

    /// Every sample.
    #[must_use]
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// The value of a metric without labels.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<f64> {
        let mut plain = self.samples.iter().filter(|sample| sample.labels.is_empty());
        plain.find(|sample| sample.name == name).map(|sample| sample.value)
    }

    /// Frames counted under verdicts with this prefix, over all ports and processors.
    ///
    /// # Errors
    /// Fails if no verdict has the prefix, so that a renamed counter does not look like zero.
    pub fn frames(&self, beginning: &str) -> Result<u64> {
        let mut found = self.verdicts().filter(|(name, _)| name.starts_with(beginning)).peekable();
        if found.peek().is_none() {
            let known: Vec<_> = self.verdicts().map(|(name, _)| name).collect();
            bail!("no verdict begins with `{beginning}`; known: {known:?}");
        }
        Ok(found.map(|(_, frames)| frames).sum())
    }

    /// Each verdict with its number of frames.
    pub fn verdicts(&self) -> impl Iterator<Item = (&str, u64)> {
        self.samples.iter().filter_map(|sample| Some((sample.label("verdict")?, sample.value as u64)))
    }
}

#[cfg(test)]
mod tests {
    use super::{Metrics, PortArgument, VERSION, fresh};
    use crate::process::write_script;
    use metadata_common::mac::Mac;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// A program that always prints this text.
    fn script_printing(directory: &Path, text: &str) -> PathBuf {
        let path = directory.join("xdp-imds");
        write_script(&path, &format!("#!/bin/sh\necho '{text}'\n")).expect("a script");
        path
    }

    #[test]
    fn a_stale_agent_is_refused_with_the_command_that_builds_it() {
        let room = tempfile::tempdir().expect("a directory");
        let stale = "xdp-imds 0.1.0 (build 00000000000000000000000000000000)";
        for (profile, command) in [
            ("debug", "`cargo build -p metadata-user --bin xdp-imds`"),
            ("release", "`cargo build -p metadata-user --bin xdp-imds --profile release`"),
        ] {
            let directory = room.path().join(profile);
            fs::create_dir(&directory).expect("a directory");
            let absent = fresh(&directory.join("xdp-imds")).expect_err("there is none").to_string();
            assert!(absent.contains("not built") && absent.contains(command), "{absent}");
            for other in ["", "xdp-imds 0.1.0", stale] {
                let refused = fresh(&script_printing(&directory, other)).expect_err(other).to_string();
                assert!(refused.contains("stale") && refused.contains(command), "{other:?}: {refused}");
            }
            let own = format!("xdp-imds {VERSION}");
            fresh(&script_printing(&directory, &own)).expect("built from the same sources");
        }
    }

    #[test]
    fn metrics_are_summed_by_verdict() {
        let text = "# HELP x y\nxdp_imds_frames_total{verdict=\"steer_arp\"} 12\n\
                    xdp_imds_frames_total{verdict=\"steer_ipv4_tcp\",hub=\"1\"} 3\nplain 4.5\n";
        let metrics = Metrics::parse(text);
        assert_eq!(metrics.frames("steer_").expect("a counter"), 15);
        assert!(metrics.frames("drop_unknown_mac").is_err());
        assert_eq!(metrics.samples().len(), 3);
        assert_eq!(["plain", "xdp_imds_frames_total"].map(|name| metrics.value(name)), [Some(4.5), None]);
    }

    #[test]
    fn a_port_is_named_as_the_command_line_reads_it() {
        let mut port = PortArgument::new("tap0", Mac([0x52, 0x54, 0, 0, 0, 1]));
        assert_eq!(port.to_string(), "tap0=52:54:00:00:00:01");
        port.netns = Some("vm1".into());
        assert_eq!(port.to_string(), "tap0@vm1=52:54:00:00:00:01");
        port.mac = None;
        assert_eq!(port.to_string(), "tap0@vm1");
    }
}
