//! Boots a kernel once, and reads its report.

use crate::architecture::Architecture;
use crate::checks::PATIENCE;
use crate::console::Report;
use anyhow::{Context as _, Result};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Memory of a guest. The file system, which lies in memory twice while the kernel unpacks it, takes half.
const MEMORY_MIB: u32 = 2_048;
const PROCESSORS: u32 = 2;
/// The longest time without a line of the report. `init.sh` ends a check before that.
const SILENCE: Duration = Duration::from_secs(PATIENCE.as_secs() + 120);
/// Octets of a console line that are read at most.
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
        if gone || !read.is_ok_and(|octets| octets > 0) || log.write_all(&line).is_err() {
            return;
        }
    }
}
