//! One boot: a namespace with bridge, tap and DHCP server, the agent on the tap, QEMU behind it.

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
/// The kernel's command line. Mitigations and security modules cost an emulated processor dearly.
pub(super) const KERNEL: &str = "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=1 mitigations=off audit=0 \
                      apparmor=0 xdp-imds-report";
/// Guest memory in MiB, and its processors.
pub(super) const MEMORY_MIB: u32 = 1_024;
pub(super) const PROCESSORS: u32 = 2;
/// Longest the DHCP server may take to come up.
const DHCP_PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(100);
/// Between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(15);

/// What a boot left behind for the report.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The guest's own words.
    pub(super) report: super::report::GuestReport,
    /// From the start of QEMU to the guest's report.
    pub(super) time: Duration,
    /// `kvm` or `tcg`.
    pub(super) accelerator: &'static str,
    /// What went over the guest's NIC.
    pub(super) traffic: wire::Traffic,
    /// The agent's metrics once it served, and after the boot.
    pub(super) metrics: (Metrics, Metrics),
    /// Where console log, report, packet dump and the servers' logs are.
    pub(super) directory: PathBuf,
}

/// Boots the image once and collects what came of it; everything it started is gone when it returns.
pub(super) fn boot(
    image: &Image,
    subject: &Subject,
    agent: &Path,
    directory: &Path,
    patience: Duration,
) -> Result<Outcome> {
    // Logs of the boot before would be taken for this one's.
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| format!("cannot empty {}", directory.display()))?;
    }
    let records = directory.join("records");
    fs::create_dir_all(&records).with_context(|| format!("cannot make {}", records.display()))?;
    let record = records.join("guest.yaml");
    replace(&record, &subject.record())?;
    // Records hold secrets; the agent warns of one that everybody may read.
    fs::set_permissions(&record, fs::Permissions::from_mode(0o640))?;

    let host = Host::new()?;
    // A tap that waits for its hypervisor, as libvirt makes it; it goes with the namespace.
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
    fs::write(directory.join("agent.log"), agent.said())?;
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

/// A child that does not outlive its guard.
#[derive(Debug)]
pub(super) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            eprintln!("process {} stays behind: {error}", self.0.id());
        }
    }
}

/// Starts a DHCP server on the bridge: its broadcasts cross the tap, so they show that what is not
/// metadata passes.
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
            bail!("dnsmasq does not serve after {DHCP_PATIENCE:?}; see {}", log_path.display());
        }
        std::thread::sleep(POLL);
    }
    Ok(server)
}

/// KVM where a guest can run under it: a `/dev/kvm` alone may belong to a processor without the feature.
pub(super) fn accelerator() -> &'static str {
    let opens = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let able = cpu.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    if opens && able { "kvm" } else { "tcg" }
}

fn qemu(image: &Image, subject: &Subject, accelerator: &str, directory: &Path) -> Result<Command> {
    // QEMU splits its options at commas and would read on in the next one.
    let place = |name: &str| {
        let path = directory.join(name).display().to_string();
        if path.contains(',') {
            bail!("QEMU cannot write to a path with a comma: {path}")
        }
        Ok(path)
    };
    let disk = image.disk().display().to_string();
    // TCG emulates the vector extensions of newer models slowly; a guest that lacks them is quicker.
    let cpu = if accelerator == "kvm" { "host" } else { "qemu64,-svm" };
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    command.args(["-machine", &format!("q35,accel={accelerator}"), "-cpu", cpu]);
    command.args(["-m", &MEMORY_MIB.to_string(), "-smp", &PROCESSORS.to_string()]);
    command.arg("-kernel").arg(image.kernel()).arg("-initrd").arg(image.initrd());
    command.args(["-append", KERNEL]);
    // What a boot writes goes to a temporary overlay: each boot is a first boot.
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

/// Waits for the guest's report; `ended` says how QEMU ended, once it has.
pub(super) fn wait(
    mut ended: impl FnMut() -> Result<Option<String>>,
    directory: &Path,
    patience: Duration,
) -> Result<(super::report::GuestReport, Instant)> {
    let path = directory.join("report.json");
    let started = Instant::now();
    let mut told = Duration::ZERO;
    loop {
        let text = fs::read_to_string(&path).unwrap_or_default();
        // The guest ends its report with a line feed: until then it may be half there.
        if text.ends_with('\n') {
            let reported = Instant::now();
            let report = serde_json::from_str(&text)
                .with_context(|| format!("{} is not the report the image makes", path.display()))?;
            return Ok((report, reported));
        }
        if let Some(status) = ended()? {
            let said = fs::read_to_string(directory.join("qemu.log")).unwrap_or_default();
            bail!("QEMU ended ({status}) before the guest reported: {}\n{}", said.trim(), tail(directory));
        }
        let elapsed = started.elapsed();
        if elapsed > patience {
            bail!("no report from the guest after {} s\n{}", patience.as_secs(), tail(directory));
        }
        if elapsed >= told + PROGRESS_EVERY {
            told = elapsed;
            println!("guest: {:>3} s  {}", elapsed.as_secs(), console(directory).last().map_or("", |l| l));
        }
        std::thread::sleep(POLL);
    }
}

/// The end of the console log, for an error.
fn tail(directory: &Path) -> String {
    let lines = console(directory);
    let end = lines[lines.len().saturating_sub(15)..].join("\n");
    format!("the console ({}) ends with:\n{end}", directory.join("console.log").display())
}

/// The console's lines that say something, without colours and cursor movements.
fn console(directory: &Path) -> Vec<String> {
    let octets = fs::read(directory.join("console.log")).unwrap_or_default();
    let text = String::from_utf8_lossy(&octets);
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
