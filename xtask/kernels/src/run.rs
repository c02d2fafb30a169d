//! `cargo xtask kernels`: every kernel on every architecture, one after the other.

use anyhow::{Context as _, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::checks::{Check, PATIENCE};
use crate::kernel::{Architecture, Kernel, Programs};
use crate::report::Row;
use crate::{checks, initramfs, kernel, report};

/// Kernels, processors and checks.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Kernels: 5.10, 6.1, 6.12 or newest (Debian's, downloaded once), or a path: a Debian package, a directory where
    /// one is unpacked, or an image [default: each of Debian's]
    #[arg(long = "kernel", value_name = "NAME|PATH", value_delimiter = ',')]
    kernels: Vec<String>,
    /// Processors; each kernel boots on each
    #[arg(long = "arch", value_name = "ARCH", value_delimiter = ',', default_value = "amd64")]
    architectures: Vec<Architecture>,
    /// The modules of an image: a directory that has lib/modules/RELEASE, or a Debian package. An image without
    /// modules needs taps, veths and bridges built in
    #[arg(long, value_name = "DIR|DEB")]
    modules: Option<PathBuf>,
    /// Run only these checks, by the names in the table
    #[arg(long = "check", value_name = "NAME", value_delimiter = ',')]
    checks: Vec<String>,
    /// Run only the checks of CI
    #[arg(long, conflicts_with = "checks")]
    short: bool,
    /// The longest time of one kernel, in minutes
    #[arg(long, value_name = "N", default_value_t = 30)]
    minutes: u64,
    /// Also write all results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The name and version of the JSON format.
const SCHEMA: &str = "kernels/1";

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let checks = args.selected()?;
    let work = shell::target().join("kernels");
    fs::create_dir_all(&work)?;
    let tools: Vec<_> = args.architectures.iter().map(|architecture| architecture.qemu()).collect();
    shell::tools::ensure(&tools)?;
    let mut rows = Vec::new();
    for &architecture in &args.architectures {
        let programs = kernel::build(architecture, &checks::programs(&checks), &work)?;
        for name in args.kernels() {
            eprintln!("\n== Linux {name}, {}", architecture.debian());
            rows.push(args.one(&name, architecture, &programs, &checks, &work));
        }
    }
    println!("{}", report::table(&rows, &checks));
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&serde_json::json!({ "schema": SCHEMA, "kernels": rows }))?;
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let faults: Vec<_> = rows.iter().flat_map(|row| row.faults(&checks)).collect();
    ensure!(faults.is_empty(), "{}\nthe consoles are in {}", faults.join("\n"), work.display());
    Ok(())
}

impl Args {
    fn kernels(&self) -> Vec<String> {
        if self.kernels.is_empty() {
            kernel::names().map(str::to_owned).collect()
        } else {
            self.kernels.clone()
        }
    }

    fn selected(&self) -> Result<Vec<&'static Check>> {
        for name in &self.checks {
            if !checks::ALL.iter().any(|check| check.name == name) {
                let names: Vec<_> = checks::ALL.iter().map(|check| check.name).collect();
                bail!("there is no check `{name}`; expected one of: {}", names.join(", "));
            }
        }
        let is_selected = |check: &&Check| {
            let named = self.checks.is_empty() || self.checks.iter().any(|name| name == check.name);
            named && (check.short || !self.short)
        };
        Ok(checks::ALL.iter().filter(is_selected).collect())
    }

    /// Boots one kernel. A failure is part of the row, so that other kernels run nevertheless.
    fn one(
        &self,
        name: &str,
        architecture: Architecture,
        programs: &Programs,
        checks: &[&Check],
        work: &Path,
    ) -> Row {
        let mut row = Row {
            kernel: name.to_owned(),
            architecture,
            seconds: 0,
            must_refuse: false,
            trouble: None,
            report: Default::default(),
        };
        let booted = kernel::find(name, architecture, self.modules.as_deref(), work).and_then(|kernel| {
            row.kernel.clone_from(&kernel.name);
            row.must_refuse = kernel.refused;
            self.boot(&kernel, architecture, programs, checks, work)
        });
        match booted {
            Ok(booted) => {
                row.seconds = booted.seconds;
                row.trouble = booted.trouble;
                row.report = booted.report;
            }
            Err(error) => row.trouble = Some(format!("{error:#}")),
        }
        if let Some(trouble) = &row.trouble {
            eprintln!("{trouble}");
        }
        row
    }

    fn boot(
        &self,
        kernel: &Kernel,
        architecture: Architecture,
        programs: &Programs,
        checks: &[&Check],
        work: &Path,
    ) -> Result<Booted> {
        let name = format!("{}-{}", kernel.name.replace('/', "_"), architecture.debian());
        let initramfs = work.join(format!("{name}.cpio"));
        initramfs::write(&initramfs, kernel, architecture, programs, checks)?;
        let console = work.join(format!("{name}.console"));
        let limit = Duration::from_secs(60 * self.minutes);
        let show = |line: &str| eprintln!("{}: {line}", kernel.name);
        let booted = boot(&kernel.image, &initramfs, architecture, &console, limit, show);
        fs::remove_file(&initramfs)?;
        booted
    }
}

// Boots a kernel once, and reads its report.

/// Memory of a guest. The file system, which lies in memory twice while the kernel unpacks it, takes half.
const MEMORY_MIB: u32 = 2_048;
const PROCESSORS: u32 = 2;
/// The longest time without a line of the report. `init.sh` ends a check before that.
const SILENCE: Duration = Duration::from_secs(PATIENCE.as_secs() + 120);
/// Bytes of a console line that are read at most.
const LONGEST_LINE: u64 = 4_096;
/// The kernel's command line. It turns off mitigations and security modules, which slow an emulated processor down.
const COMMAND_LINE: &str =
    "rdinit=/init panic=-1 quiet loglevel=4 mitigations=off audit=0 apparmor=0 random.trust_cpu=on";

/// How a boot ended.
#[derive(Debug)]
pub(crate) struct Booted {
    pub(crate) report: Report,
    pub(crate) seconds: u64,
    /// Why the report is incomplete, if it is.
    pub(crate) trouble: Option<String>,
}

/// Boots a kernel until the guest switches off, its report stops, or `limit` passes. Writes the console to a file.
pub(crate) fn boot(
    image: &Path,
    initramfs: &Path,
    architecture: Architecture,
    console: &Path,
    limit: Duration,
    mut show: impl FnMut(&str),
) -> Result<Booted> {
    let started = Instant::now();
    let mut qemu = Running(qemu(image, initramfs, architecture).spawn().context("cannot start QEMU")?);
    let output = qemu.0.stdout.take().context("the console is piped")?;
    let log = File::create(console).with_context(|| format!("cannot write {}", console.display()))?;
    let (lines, arriving) = channel();
    std::thread::Builder::new().name("console".into()).spawn(move || read(output, log, &lines))?;
    let mut report = Report::default();
    let trouble = loop {
        let Some(left) = limit.checked_sub(started.elapsed()) else {
            break Some(format!("the guest runs longer than {} s", limit.as_secs()));
        };
        match arriving.recv_timeout(left.min(SILENCE)) {
            Ok(line) => {
                if let Some(text) = report.read(&line) {
                    show(&text);
                }
                if report.complete {
                    break None;
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                break Some("the guest stopped before its last check".into());
            }
            Err(RecvTimeoutError::Timeout) if left > SILENCE => {
                break Some(format!("the guest was silent for {} s", SILENCE.as_secs()));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    };
    Ok(Booted { report, seconds: started.elapsed().as_secs(), trouble })
}

/// QEMU, killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            eprintln!("cannot end QEMU {}: {error}", self.0.id());
        }
    }
}

fn qemu(image: &Path, initramfs: &Path, architecture: Architecture) -> Command {
    let mut command = Command::new(architecture.qemu().0);
    command.args(architecture.machine()).args(["-nodefaults", "-display", "none"]);
    command.args(["-no-reboot", "-serial", "stdio"]);
    command.args(["-m", &MEMORY_MIB.to_string(), "-smp", &PROCESSORS.to_string()]);
    command.arg("-kernel").arg(image).arg("-initrd").arg(initramfs);
    command.args(["-append", &format!("console={} {COMMAND_LINE}", architecture.console())]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// Copies the console to a file, and sends each line.
fn read(output: impl Read, mut log: File, lines: &Sender<String>) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut output).take(LONGEST_LINE).read_until(b'\n', &mut line);
        // The other side goes when it has seen enough.
        let gone = lines.send(String::from_utf8_lossy(&line).into_owned()).is_err();
        if gone || !read.is_ok_and(|bytes| bytes > 0) || log.write_all(&line).is_err() {
            return;
        }
    }
}

// Reads the report in the console of a guest. `init.sh` writes it, in lines that begin with `@@`.

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    /// Every test passed, and none was skipped.
    Passed,
    Failed,
    /// The check took longer than its limit.
    Timeout,
    /// The kernel lacks what the check needs beyond the agent's needs.
    Absent,
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Finding {
    pub(crate) check: String,
    pub(crate) outcome: Outcome,
    /// Seconds by the guest's clock.
    pub(crate) seconds: u64,
    /// Numbers of tests.
    pub(crate) passed: usize,
    pub(crate) skipped: usize,
}

/// What a guest has reported so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Report {
    /// The kernel's release, as `uname -r` prints it.
    pub(crate) release: String,
    pub(crate) checks: Vec<Finding>,
    /// Instructions that the verifier processed, by program. Its limit is a million.
    pub(crate) instructions: BTreeMap<String, u32>,
    /// The failing checks of doctor about the kernel. If there are any, no other check ran.
    pub(crate) refused: Vec<String>,
    /// The exit status of `serve` on a kernel that doctor finds unfit, and its last words.
    pub(crate) serve: Option<i32>,
    pub(crate) says: Vec<String>,
    /// The guest ran everything.
    pub(crate) complete: bool,
}

/// The beginning of a line of the report.
const MARK: &str = "@@ ";

impl Report {
    /// Reads a line of the console. Returns what a person should see of it.
    pub(crate) fn read(&mut self, line: &str) -> Option<String> {
        let line = line.trim_end().strip_prefix(MARK)?;
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        match kind {
            "boot" => {
                let (release, seconds) = rest.split_once(' ')?;
                self.release = release.to_owned();
                return Some(format!("Linux {release}, up after {seconds} s"));
            }
            "start" => return Some(format!("{rest} …")),
            "check" => {
                let finding = finding(rest)?;
                let shown = match finding.outcome {
                    Outcome::Absent => format!("{}: not on this kernel", finding.check),
                    _ => format!("{}: {:?} after {} s", finding.check, finding.outcome, finding.seconds),
                };
                self.checks.push(finding);
                return Some(shown);
            }
            "instructions" => {
                let (program, count) = rest.split_once(' ')?;
                self.instructions.insert(program.to_owned(), count.parse().ok()?);
            }
            "refused" => {
                self.refused.push(rest.to_owned());
                return Some(rest.to_owned());
            }
            "serve" => self.serve = rest.parse().ok(),
            "says" => {
                self.says.push(rest.to_owned());
                return Some(format!("serve: {rest}"));
            }
            "log" => return Some(format!("  {rest}")),
            "end" => self.complete = true,
            _ => {}
        }
        None
    }

    /// The result of a check; `None` if the guest did not report it.
    pub(crate) fn of(&self, check: &str) -> Option<&Finding> {
        self.checks.iter().find(|finding| finding.check == check)
    }
}

/// Reads `NAME|OUTCOME|SECONDS|PASSED|SKIPPED`.
fn finding(line: &str) -> Option<Finding> {
    let [check, outcome, seconds, passed, skipped] = line.split('|').collect::<Vec<_>>()[..] else {
        return None;
    };
    let outcome = match outcome {
        "passed" => Outcome::Passed,
        "timeout" => Outcome::Timeout,
        "absent" => Outcome::Absent,
        _ => Outcome::Failed,
    };
    Some(Finding {
        check: check.to_owned(),
        outcome,
        seconds: seconds.parse().ok()?,
        passed: passed.parse().ok()?,
        skipped: skipped.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::{Outcome, Report};

    fn read(lines: &[&str]) -> Report {
        let mut report = Report::default();
        for line in lines {
            report.read(line);
        }
        report
    }

    #[test]
    fn a_report_is_read_from_the_lines_of_a_console() {
        let report = read(&[
            "[    1.2] a message of the kernel @@ check x|passed|1|1|0",
            "@@ boot 6.1.0-50-cloud-amd64 12.5\r",
            "@@ instructions port 158741",
            "@@ check AF_XDP|passed|14|6|0",
            "@@ check sandbox|failed|3|1|0",
            "@@ check guest|timeout|420|0|0",
            "@@ check tcx|absent|0|0|0",
            "@@ end",
        ]);
        assert_eq!(report.release, "6.1.0-50-cloud-amd64");
        assert_eq!(report.instructions["port"], 158_741);
        let found: Vec<_> =
            report.checks.iter().map(|of| (of.check.as_str(), of.outcome, of.passed)).collect();
        assert_eq!(
            found,
            [
                ("AF_XDP", Outcome::Passed, 6),
                ("sandbox", Outcome::Failed, 1),
                ("guest", Outcome::Timeout, 0),
                ("tcx", Outcome::Absent, 0)
            ]
        );
        assert!(report.complete);
    }

    #[test]
    fn a_refusal_keeps_the_words_of_doctor_and_agent() {
        let report =
            read(&["@@ refused FAIL kernel.version: too old", "@@ serve 1", "@@ says Error: no cookie"]);
        assert_eq!(report.refused, ["FAIL kernel.version: too old"]);
        assert_eq!((report.serve, &report.says[..]), (Some(1), &["Error: no cookie".to_owned()][..]));
        assert!(!report.complete);
    }

    #[test]
    fn a_line_that_is_cut_off_changes_nothing() {
        for line in
            ["@@", "@@ check", "@@ check x|passed|1", "@@ instructions port", "@@ check x|passed|1|?|0"]
        {
            assert_eq!(read(&[line]), Report::default(), "{line}");
        }
    }
}
