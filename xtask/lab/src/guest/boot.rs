//! Boots a guest once: a namespace with bridge, tap and DHCP server, the agent on the tap, and QEMU behind the tap.

use super::image::Image;
use super::subject::Subject;
use super::wire;
use anyhow::{Context as _, Result, bail};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::agent::{self, Agent, Metrics, PortArgument};
use support::host::{self, Host};
use support::netns::Namespace;
use support::record::replace;

const TAP: &str = "tap0";
/// The kernel's command line. It turns off mitigations and security modules, which slow an emulated processor down.
pub(super) const KERNEL: &str = "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=1 mitigations=off audit=0 \
                      apparmor=0 xdp-imds-report";
/// The guest's memory in MiB, and its number of processors.
pub(super) const MEMORY_MIB: u32 = 1_024;
pub(super) const PROCESSORS: u32 = 2;
/// The longest time the DHCP server may take to come up.
const DHCP_PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(100);
/// Interval of progress lines.
const PROGRESS_EVERY: Duration = Duration::from_secs(15);

/// The results of a boot, for the report.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The report that the guest wrote.
    pub(super) report: super::report::GuestReport,
    /// Time from the start of QEMU to the guest's report.
    pub(super) time: Duration,
    /// QEMU's accelerator: `kvm` or `tcg`.
    pub(super) accelerator: &'static str,
    /// The traffic on the guest's NIC.
    pub(super) traffic: wire::Traffic,
    /// The agent's metrics before and after the boot.
    pub(super) metrics: (Metrics, Metrics),
    /// The directory of the console log, the report, the packet dump and the servers' logs.
    pub(super) directory: PathBuf,
}

/// Boots the image once and collects the results. All processes that it started have ended when it returns.
pub(super) fn boot(
    image: &Image,
    subject: &Subject,
    agent: &Path,
    directory: &Path,
    patience: Duration,
) -> Result<Outcome> {
    // Files of an earlier boot could be taken for files of this one.
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| format!("cannot empty {}", directory.display()))?;
    }
    let records = directory.join("records");
    fs::create_dir_all(&records).with_context(|| format!("cannot make {}", records.display()))?;
    let record = records.join("guest.yaml");
    replace(&record, &subject.record())?;
    // Records hold secrets, so the agent warns of records that everybody may read.
    fs::set_permissions(&record, fs::Permissions::from_mode(0o640))?;

    let host = Host::new()?;
    // The tap exists before its hypervisor, as with libvirt. It disappears with the namespace.
    host.ns().ip_batch(&format!(
        "tuntap add dev {TAP} mode tap vnet_hdr\nlink set {TAP} master {} up\n",
        host::BRIDGE
    ))?;
    let port = PortArgument::new(TAP, subject.mac);
    let agent = Agent::start_binary(agent, host.ns(), agent::arguments(&records, &[port]))?;
    let _dhcp = dhcp(host.ns(), subject, directory)?;
    let before = agent.metrics()?;

    let accelerator = accelerator();
    let (name, console) = (subject.dialect.name(), directory.join("console.log"));
    println!("guest: booting for {name} under {accelerator}, console in {}", console.display());
    let started = Instant::now();
    let mut qemu = Running(host.ns().spawn(&mut qemu(image, subject, accelerator, directory)?)?);
    let ended = || Ok(qemu.0.try_wait()?.map(|status| status.to_string()));
    let waited = wait(ended, directory, patience);
    let metrics = (before, agent.metrics()?);
    fs::write(directory.join("agent.log"), agent.log())?;
    let (report, reported) = waited?;
    drop(qemu);
    let traffic = wire::read(&fs::read(directory.join("wire.pcap"))?, subject.mac)?;
    let status = agent.stop()?;
    if !status.success() {
        bail!("the agent ended with {status} after SIGTERM; see agent.log in {}", directory.display());
    }
    let time = reported.duration_since(started);
    Ok(Outcome { report, time, accelerator, traffic, metrics, directory: directory.to_owned() })
}

/// A child process that is killed when this guard is dropped.
#[derive(Debug)]
pub(super) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            eprintln!("cannot end process {}: {error}", self.0.id());
        }
    }
}

/// Starts a DHCP server on the bridge. Its broadcasts cross the tap, which shows that frames other than metadata pass.
pub(super) fn dhcp(ns: &Namespace, subject: &Subject, directory: &Path) -> Result<Running> {
    let log_path = directory.join("dnsmasq.log");
    let log = File::create(&log_path)?;
    let mut command = Command::new("dnsmasq");
    command.args(["--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--pid-file=", "--user=root"]);
    command.args(["--bind-interfaces", "--no-ping", "--log-dhcp", "--dhcp-authoritative"]);
    command.arg(format!("--interface={}", host::BRIDGE));
    let lease = subject.lease;
    command.arg(format!("--dhcp-range={lease},{lease},255.255.0.0,1h"));
    command.arg(format!("--dhcp-host={},{lease}", subject.mac));
    command.arg(format!("--dhcp-option=option:router,{}", host::ADDRESS));
    command.arg(format!("--dhcp-leasefile={}", directory.join("leases").display()));
    command.arg(format!("--log-facility={}", log_path.display()));
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut server = Running(ns.spawn(&mut command)?);
    let end = Instant::now() + DHCP_PATIENCE;
    while !fs::read_to_string(&log_path)?.contains("DHCP, IP range") {
        if let Some(status) = server.0.try_wait()? {
            bail!("dnsmasq ended ({status}): {}", fs::read_to_string(&log_path)?.trim());
        }
        if Instant::now() > end {
            bail!("dnsmasq did not come up within {DHCP_PATIENCE:?}; see {}", log_path.display());
        }
        std::thread::sleep(POLL);
    }
    Ok(server)
}

/// Returns `kvm` where a guest can run under it. `/dev/kvm` can exist on a processor without the feature, so that is
/// checked too.
pub(super) fn accelerator() -> &'static str {
    let opens = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let able = cpu.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    if opens && able { "kvm" } else { "tcg" }
}

fn qemu(image: &Image, subject: &Subject, accelerator: &str, directory: &Path) -> Result<Command> {
    // QEMU splits its options at commas, so a comma in a path would begin another option.
    let place = |name: &str| {
        let path = directory.join(name).display().to_string();
        if path.contains(',') {
            bail!("QEMU cannot write to a path with a comma: {path}")
        }
        Ok(path)
    };
    let disk = image.disk().display().to_string();
    // TCG emulates the vector extensions of newer models slowly. A guest boots faster without them.
    let cpu = if accelerator == "kvm" { "host" } else { "qemu64,-svm" };
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    command.args(["-machine", &format!("q35,accel={accelerator}"), "-cpu", cpu]);
    command.args(["-m", &MEMORY_MIB.to_string(), "-smp", &PROCESSORS.to_string()]);
    command.arg("-kernel").arg(image.kernel()).arg("-initrd").arg(image.initrd());
    command.args(["-append", KERNEL]);
    // Writes go to a temporary overlay, so that each boot is a first boot.
    command.args(["-drive", &format!("file={disk},if=virtio,format=raw,snapshot=on")]);
    command.args(["-netdev", &format!("tap,id=n0,ifname={TAP},script=no,downscript=no")]);
    command.args(["-device", &format!("virtio-net-pci,netdev=n0,mac={},romfile=", subject.mac)]);
    command.args(["-object", &format!("filter-dump,id=wire,netdev=n0,file={}", place("wire.pcap")?)]);
    command.args(["-device", "virtio-rng-pci"]);
    command.args(["-serial", &format!("file:{}", place("console.log")?)]);
    command.args(["-serial", &format!("file:{}", place("report.json")?)]);
    for table in subject.dialect.smbios(subject) {
        command.args(["-smbios", &table]);
    }
    let log = File::create(directory.join("qemu.log"))?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    Ok(command)
}

/// Waits for the guest's report. `ended` returns how QEMU ended, or `None` while it runs.
pub(super) fn wait(
    mut ended: impl FnMut() -> Result<Option<String>>,
    directory: &Path,
    patience: Duration,
) -> Result<(super::report::GuestReport, Instant)> {
    let path = directory.join("report.json");
    let started = Instant::now();
    let mut reported_at = Duration::ZERO;
    loop {
        let text = fs::read_to_string(&path).unwrap_or_default();
        // The guest ends its report with a line feed. Without it the report may be incomplete.
        if text.ends_with('\n') {
            let reported = Instant::now();
            let report = serde_json::from_str(&text)
                .with_context(|| format!("{} is not a valid report", path.display()))?;
            return Ok((report, reported));
        }
        if let Some(status) = ended()? {
            let output = fs::read_to_string(directory.join("qemu.log")).unwrap_or_default();
            bail!("QEMU ended ({status}) before the guest reported: {}\n{}", output.trim(), tail(directory));
        }
        let elapsed = started.elapsed();
        if elapsed > patience {
            bail!("no report from the guest after {} s\n{}", patience.as_secs(), tail(directory));
        }
        if elapsed >= reported_at + PROGRESS_EVERY {
            reported_at = elapsed;
            println!("guest: {:>3} s  {}", elapsed.as_secs(), console(directory).last().map_or("", |l| l));
        }
        std::thread::sleep(POLL);
    }
}

/// Returns the end of the console log, for an error.
fn tail(directory: &Path) -> String {
    let lines = console(directory);
    let end = lines[lines.len().saturating_sub(15)..].join("\n");
    format!("the console ({}) ends with:\n{end}", directory.join("console.log").display())
}

/// Returns the console's lines that are not empty, without colours and cursor movements.
fn console(directory: &Path) -> Vec<String> {
    let bytes = fs::read(directory.join("console.log")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines = text.lines().map(|line| {
        let mut plain = String::new();
        let mut escape = false;
        for c in line.chars() {
            match c {
                '\u{1b}' => escape = true,
                _ if escape => escape = !c.is_ascii_alphabetic(),
                _ if !c.is_control() => plain.push(c),
                _ => {}
            }
        }
        plain.trim().to_owned()
    });
    lines.filter(|line| !line.is_empty()).collect()
}
