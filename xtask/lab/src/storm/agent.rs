//! The storm's subject xdp-imds: the agent as an operator runs it, with a record for each guest.

use super::cpu;
use super::peer::{Disturbance, Running, Scene, Subject};
use anyhow::{Context as _, Result, bail, ensure};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::bpffs::Bpffs;
use support::eventually::eventually;
use support::process;

/// The name of the subject in tables and files.
pub(super) const NAME: &str = "xdp-imds";
/// The address of the agent's metrics, inside its namespace.
const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9_253);
/// The longest time the agent may take to read all records and attach all taps, or to stop.
const PATIENCE: Duration = Duration::from_secs(120);
/// Interval at which the agent's readiness is checked.
const PAUSE: Duration = Duration::from_millis(5);

/// The agent and its files.
pub(super) struct Agent {
    pub(super) binary: PathBuf,
    pub(super) records: PathBuf,
    /// Further lines of its YAML configuration, for comparisons of settings.
    pub(super) configuration: String,
    directory: Option<tempfile::TempDir>,
    /// The directory for pinned links and maps; `None` if nothing is pinned.
    pins: Option<Bpffs>,
}

impl Agent {
    /// Describes an agent of `binary` that serves `records`. It does not run yet.
    pub(super) fn new(binary: PathBuf, records: PathBuf, configuration: String, pins: Option<Bpffs>) -> Self {
        Self { binary, records, configuration, directory: None, pins }
    }

    fn file(&self, name: &str) -> Result<PathBuf> {
        Ok(self.directory.as_ref().context("`prepare` was not called")?.path().join(name))
    }
}

impl Subject for Agent {
    fn name(&self) -> &'static str {
        NAME
    }

    fn version(&self) -> Result<String> {
        Ok(support::netns::run(Command::new(&self.binary).arg("--version"))?.trim().to_owned())
    }

    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()> {
        self.directory = Some(tempfile::tempdir()?);
        let mut text = format!("{}\nports:\n", self.configuration.trim_end());
        for tenant in scene.tenants {
            writeln!(text, "- {{ifname: {}, mac: \"{}\"}}", tenant.tap, tenant.mac)?;
        }
        Ok(std::fs::write(self.file("config.yaml")?, text)?)
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>> {
        let mut serving =
            Serving { child: self.spawn(scene, false)?, agent: self, scene, log: self.file("log")? };
        serving.wait(scene.tenants.len())?;
        Ok(Box::new(serving))
    }
}

impl Agent {
    /// Starts a process, which takes over from the running agent if `takeover` is set.
    fn spawn(&self, scene: &Scene<'_>, takeover: bool) -> Result<Child> {
        let mut command = match scene.pinned {
            None => Command::new(&self.binary),
            Some(cores) => {
                let cores: Vec<_> = cores.iter().map(usize::to_string).collect();
                let mut command = Command::new("taskset");
                command.args(["--cpu-list", &cores.join(",")]).arg(&self.binary);
                command
            }
        };
        command.args(["serve", "--metrics", &METRICS.to_string()]);
        command.arg("--config").arg(self.file("config.yaml")?).arg("--records").arg(&self.records);
        command.arg("--state").arg(self.file("state")?).env("NO_COLOR", "1");
        command.arg("--run").arg(self.file("run")?);
        match &self.pins {
            Some(bpffs) => command.arg("--pins").arg(bpffs.pins()),
            None => command.arg("--no-pins"),
        };
        if takeover {
            command.arg("--takeover");
        }
        let file = File::options().create(true).append(true).open(self.file("log")?)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        scene.node.spawn(&mut command)
    }
}

/// A running agent.
struct Serving<'a> {
    child: Child,
    agent: &'a Agent,
    scene: &'a Scene<'a>,
    log: PathBuf,
}

impl Serving<'_> {
    /// Waits until `ports` ports are attached.
    fn wait(&mut self, ports: usize) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            ensure!(self.child.try_wait()?.is_none(), "the agent ended:\n{}", tail(&self.log));
            let metrics = self.scene.node.run_in(metrics).unwrap_or_default();
            if sample(&metrics, "xdp_imds_ports").is_some_and(|attached| attached as usize >= ports) {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "the agent did not attach {ports} ports within {PATIENCE:?}:\n{}",
                tail(&self.log)
            );
            std::thread::sleep(PAUSE);
        }
    }

    fn end(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        process::terminate(self.child.id())?;
        let ended = eventually(PATIENCE, || {
            ensure!(self.child.try_wait()?.is_some(), "the agent has not ended");
            Ok(())
        });
        if ended.is_err() {
            self.child.kill()?;
            self.child.wait()?;
            bail!("the agent did not stop and was killed:\n{}", tail(&self.log));
        }
        Ok(())
    }
}

impl Running for Serving<'_> {
    fn pids(&self) -> Vec<u32> {
        std::iter::once(self.child.id()).chain(self.signer()).collect()
    }

    /// The signer is the agent's only child.
    fn signer(&self) -> Option<u32> {
        cpu::child_of(self.child.id())
    }

    fn run_directory(&self) -> Option<PathBuf> {
        self.agent.file("run").ok()
    }

    fn attached_in(&self) -> Option<Duration> {
        let metrics = self.scene.node.run_in(metrics).ok()?;
        sample(&metrics, "xdp_imds_attach_seconds_median").map(Duration::from_secs_f64)
    }

    fn disturb(&mut self, what: Disturbance) -> Result<()> {
        match what {
            Disturbance::Kill9 => {
                self.child.kill()?;
                self.child.wait()?;
                self.child = self.agent.spawn(self.scene, false)?;
                self.wait(self.scene.tenants.len())
            }
            Disturbance::TakeOver => {
                let next = self.agent.spawn(self.scene, true)?;
                let mut previous = std::mem::replace(&mut self.child, next);
                let ended =
                    eventually(PATIENCE, || previous.try_wait()?.context("the previous agent has not ended"));
                if ended.is_err() {
                    previous.kill()?;
                    previous.wait()?;
                }
                let status = ended.with_context(|| tail(&self.log))?;
                ensure!(status.success(), "the previous agent ended with {status}:\n{}", tail(&self.log));
                self.wait(self.scene.tenants.len())
            }
        }
    }

    fn stop(mut self: Box<Self>) -> Result<()> {
        self.end()?;
        // The next round, or another subject, must find the taps without programs.
        match &self.agent.pins {
            Some(bpffs) => metadata_steer::release(&bpffs.pins(), false).map(drop).map_err(Into::into),
            None => Ok(()),
        }
    }
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("cannot end agent {}: {error:#}", self.child.id());
        }
    }
}

fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let last: Vec<_> = text.lines().rev().take(10).collect();
    last.into_iter().rev().collect::<Vec<_>>().join("\n")
}

/// Fetches the metrics page, in the namespace of this thread.
fn metrics() -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&METRICS, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {METRICS}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Returns the value of a metric without labels.
fn sample(metrics: &str, name: &str) -> Option<f64> {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    metrics.lines().find_map(value)
}

#[cfg(test)]
mod tests {
    use super::sample;

    #[test]
    fn a_metric_is_found_by_its_whole_name() {
        let metrics =
            "HTTP/1.1 200 OK\r\n\r\n# TYPE xdp_imds_ports gauge\nxdp_imds_ports_more 7\nxdp_imds_ports 61\n";
        assert_eq!(sample(metrics, "xdp_imds_ports"), Some(61.0));
        assert_eq!(sample(metrics, "xdp_imds_port"), None);
    }
}
