//! `cargo xtask guest`: boots a real Debian 12 guest on a tap that xdp-imds serves, and reports the results of its
//! unmodified cloud-init.
//!
//! ```text
//!  private network namespace
//!  ┌───────────────────────────────────────────────────────────────┐
//!  │ QEMU: Debian 12 ── tap0 ── XDP `port` ── xdp-imds serve       │
//!  │  ttyS0 console.log  │                                         │
//!  │  ttyS1 report.json  └── br0 10.0.2.2/16 ── dnsmasq (DHCP)     │
//!  └───────────────────────────────────────────────────────────────┘
//! ```

mod events;
mod image;
mod report;
mod wire;

use anyhow::{Context as _, Result, bail, ensure};
use image::DiskImage;
use metadata_common::mac::Mac;
use serde_json::{Value, json};
use shell::tools;
use std::ffi::OsString;
use std::fs;
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::agent::{Agent, Metrics, PortArgument};
use support::guest::event_unit_config;
use support::host::Host;
use support::netns::Namespace;
use support::record::replace;
use support::{agent, host};
use wire::Finding;

/// The programs that the verb runs, and their Debian packages.
const TOOLS: &[(&str, &str)] = &[
    ("debootstrap", "debootstrap"),
    ("dnsmasq", "dnsmasq-base"),
    ("ip", "iproute2"),
    ("mke2fs", "e2fsprogs"),
    ("qemu-system-x86_64", "qemu-system-x86"),
];

/// Dialects, timeout, image and agent of a run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The dialects to boot, separated by commas, one boot each. The guest's SMBIOS shows the dialect, and cloud-init
    /// must find it
    #[arg(long, value_enum, value_delimiter = ',', default_value = "nocloud")]
    dialect: Vec<BootDialect>,
    /// The longest time from power-on to the guest's report, in seconds
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(10..=3_600))]
    timeout: u64,
    /// Let Debian's libvirt start the guest; its hook makes the record from the domain's metadata and a file
    #[arg(long)]
    libvirt: bool,
    /// Announce events once the guest has reported. Its cloud-init installs the book's unit, which must acknowledge them
    /// and shut the guest down
    #[arg(long, conflicts_with = "libvirt")]
    events: bool,
    /// Make the image again, even if the cached one fits its recipe
    #[arg(long)]
    rebuild: bool,
    /// Make the image and boot nothing
    #[arg(long)]
    image_only: bool,
    /// The agent to run, instead of building one
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.image_only {
        let image = ready(args)?;
        println!("image ready: {}", image.disk().display());
        return Ok(());
    }
    let agent = match &args.agent {
        Some(agent) => agent.clone(),
        None => {
            let words = ["build", "--release", "--package", "metadata-user", "--bin", "xdp-imds"];
            shell::run(&mut shell::cargo(words))?;
            let built = shell::target().join("release/xdp-imds");
            shell::go_on_as_root(&[OsString::from("--agent"), built.clone().into()])?;
            built
        }
    };
    let image = ready(args)?;
    let cloud_config = args.events.then(event_unit_config).transpose()?;
    let mut boots = Vec::new();
    for &dialect in &args.dialect {
        let subject = BootSubject { cloud_config, ..BootSubject::of(dialect) };
        let directory = shell::target().join("guest").join(dialect.name());
        let patience = Duration::from_secs(args.timeout);
        let (outcome, more) = if args.libvirt {
            image::boot(&image, &subject, &agent, &directory.with_extension("libvirt"), patience)?
        } else {
            boot(&image, &subject, &agent, &directory, patience)?
        };
        let mut findings = wire::findings(&subject, &outcome);
        findings.extend(more);
        report::boot(&subject, &outcome, &findings)?;
        boots.push((subject, outcome, findings));
    }
    if boots.len() > 1 {
        report::table(&boots);
    }
    let findings: Vec<_> = boots.iter().flat_map(|(_, _, findings)| findings).collect();
    let failed = findings.iter().filter(|finding| !finding.holds).count();
    ensure!(failed == 0, "{failed} of {} checks failed; see above", findings.len());
    Ok(())
}

/// Becomes root, installs missing tools and returns the image.
fn ready(args: &Args) -> Result<DiskImage> {
    shell::go_on_as_root(&[])?;
    tools::ensure(TOOLS)?;
    if args.libvirt {
        tools::ensure(support::libvirt::TOOLS)?;
    }
    image::ready(&shell::target().join("guest-image"), args.rebuild)
}

// Boots a guest once: a namespace with bridge, tap and DHCP server, the agent on the tap, and QEMU behind the tap.

const TAP: &str = "tap0";
/// The file of the guest's record.
const RECORD: &str = "guest.yaml";
/// The kernel's command line. It turns off mitigations and security modules, which slow an emulated processor down.
const KERNEL: &str = "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=1 mitigations=off audit=0 \
                      apparmor=0 xdp-imds-report";
/// The guest's memory in MiB, and its number of processors.
const MEMORY_MIB: u32 = 1_024;
const PROCESSORS: u32 = 2;
/// The longest time the DHCP server may take to come up.
const DHCP_PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(100);
/// Interval of progress lines.
const PROGRESS_EVERY: Duration = Duration::from_secs(15);

/// The results of a boot, for the report.
#[derive(Debug)]
struct BootOutcome {
    /// The report that the guest wrote.
    report: report::GuestReport,
    /// Time from the start of QEMU to the guest's report.
    time: Duration,
    /// QEMU's accelerator: `kvm` or `tcg`.
    accelerator: &'static str,
    /// The traffic on the guest's NIC.
    traffic: wire::Traffic,
    /// The agent's metrics before and after the boot.
    metrics: (Metrics, Metrics),
    /// The directory of the console log, the report, the packet dump and the servers' logs.
    directory: PathBuf,
}

/// Boots the image once and collects the results, and the findings about events if they were announced. All processes
/// that it started have ended when it returns.
fn boot(
    image: &DiskImage,
    subject: &BootSubject,
    agent: &Path,
    directory: &Path,
    patience: Duration,
) -> Result<(BootOutcome, Vec<Finding>)> {
    // Files of an earlier boot could be taken for files of this one.
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| format!("cannot empty {}", directory.display()))?;
    }
    let records = directory.join("records");
    fs::create_dir_all(&records).with_context(|| format!("cannot make {}", records.display()))?;
    let record = records.join(RECORD);
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
    let mut ended = || Ok(qemu.0.try_wait()?.map(|status| status.to_string()));
    let waited = wait(&mut ended, directory, patience);
    let metrics = (before, agent.metrics()?);
    let announced = match subject.cloud_config {
        Some(_) if waited.is_ok() => events::announce(&agent, &records, RECORD, directory, ended),
        _ => Ok(Vec::new()),
    };
    fs::write(directory.join("agent.log"), agent.log())?;
    let ((report, reported), findings) = (waited?, announced?);
    drop(qemu);
    let traffic = wire::read(&fs::read(directory.join("wire.pcap"))?, subject.mac)?;
    let status = agent.stop()?;
    if !status.success() {
        bail!("the agent ended with {status} after SIGTERM; see agent.log in {}", directory.display());
    }
    let time = reported.duration_since(started);
    let outcome =
        BootOutcome { report, time, accelerator, traffic, metrics, directory: directory.to_owned() };
    Ok((outcome, findings))
}

/// A child process that is killed when this guard is dropped.
#[derive(Debug)]
struct Running(Child);

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
fn dhcp(ns: &Namespace, subject: &BootSubject, directory: &Path) -> Result<Running> {
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
fn accelerator() -> &'static str {
    let opens = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let able = cpu.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    if opens && able { "kvm" } else { "tcg" }
}

fn qemu(image: &DiskImage, subject: &BootSubject, accelerator: &str, directory: &Path) -> Result<Command> {
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
fn wait(
    mut ended: impl FnMut() -> Result<Option<String>>,
    directory: &Path,
    patience: Duration,
) -> Result<(report::GuestReport, Instant)> {
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

// The values of the guest's record. The guest must have them after its boot.

/// The address that the DHCP server assigns.
const LEASE: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// An address that no DHCP server assigns. A guest learns it only from its dialect.
const STATIC: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 20);
/// The file that user-data writes and the guest's report includes.
const MARKER: &str = "/run/xdp-imds-user-data";

/// The values of one guest's record.
#[derive(Debug)]
struct BootSubject {
    dialect: BootDialect,
    mac: Mac,
    /// The system UUID in SMBIOS.
    uuid: &'static str,
    /// The instance id of EC2, where it differs from the UUID.
    ec2_id: &'static str,
    hostname: &'static str,
    ssh_key: &'static str,
    /// The text that user-data writes to [`MARKER`].
    marker: &'static str,
    /// The address that the DHCP server assigns.
    lease: Ipv4Addr,
    /// The beginning of its user-data, up to an entry of `runcmd`, if it must react to events.
    cloud_config: Option<&'static str>,
}

impl BootSubject {
    /// Returns the guest for a dialect.
    fn of(dialect: BootDialect) -> Self {
        Self {
            dialect,
            mac: Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]),
            uuid: match dialect {
                BootDialect::NoCloud | BootDialect::OpenStack => "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d",
                // The beginning that AWS uses.
                BootDialect::Ec2 => "ec2f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d",
            },
            ec2_id: "i-0f5e8a1b2c3d4e5f6",
            hostname: "debian-guest",
            ssh_key: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8wUQ0H0m1c3a0nYf1mVYQx0b7m2wq8q0R4T0qX9V1k lab@example",
            marker: "applied",
            lease: LEASE,
            cloud_config: None,
        }
    }

    /// Returns the instance id that cloud-init must have after the boot.
    fn instance_id(&self) -> &'static str {
        match self.dialect {
            BootDialect::NoCloud | BootDialect::OpenStack => self.uuid,
            BootDialect::Ec2 => self.ec2_id,
        }
    }

    /// Returns the address that the NIC must have after the boot. OpenStack has a static one; EC2 and 22.4's NoCloud
    /// use DHCP.
    fn address(&self) -> Ipv4Addr {
        match self.dialect {
            BootDialect::NoCloud | BootDialect::Ec2 => self.lease,
            BootDialect::OpenStack => STATIC,
        }
    }

    fn user_data(&self) -> String {
        let (start, more) = match self.cloud_config {
            Some(start) => (start, events::TELLS),
            None => ("#cloud-config\nruncmd:\n", ""),
        };
        format!("{start}{more}- [sh, -c, \"echo {} > {MARKER}\"]\n", self.marker)
    }

    /// Returns the record as JSON, which is also YAML.
    fn record(&self) -> String {
        let record = json!({
            "schema": "vmrecord/1",
            "generation": 1,
            "vm": {
                "uuid": self.uuid,
                "ec2_id": self.ec2_id,
                "name": self.hostname,
                "project": {"id": "lab", "number": 1, "account": "000000000000"},
            },
            "hostname": {"short": self.hostname, "domain": "lab.internal"},
            "placement": {"region": "local", "zone": "local-a"},
            "ssh_keys": [{"name": "default", "key": self.ssh_key}],
            "user_data": {"text": self.user_data()},
            "metadata": {"role": "guest"},
            "network": {"nics": [{
                "id": "n0",
                "name": "eth0",
                "mac": self.mac.to_string(),
                "mtu": 1500,
                "network_id": "lab",
                "addresses": [self.address_entry()],
            }]},
            // An AWS guest uses tokens in any case. This record also requires them.
            "serve": {"smbios": self.dialect.name(), "imdsv2": self.imdsv2()},
        });
        format!("{record:#}\n")
    }

    fn address_entry(&self) -> Value {
        let address = self.address();
        let method = if address == self.lease { "dhcp4" } else { "static" };
        json!({"method": method, "address": format!("{address}/16"), "gateway": host::ADDRESS.to_string()})
    }

    fn imdsv2(&self) -> &'static str {
        if self.dialect == BootDialect::Ec2 { "required" } else { "optional" }
    }
}

// The SMBIOS values by which cloud-init finds a dialect, and the expected results of a boot with them.

/// The seed in SMBIOS, identical to the one in policy, webhook and manual. Without `dsmode`, Debian 12's cloud-init
/// (22.4) discards the fetched documents. Later versions call the older name `nocloud-net` deprecated.
const SEED: &str = "ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/";

/// A dialect that Debian's cloud-init finds by SMBIOS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum BootDialect {
    /// The NoCloud seed, fetched once the guest's own network is up
    #[value(name = "nocloud")]
    NoCloud,
    /// OpenStack's documents and its EC2 tree, fetched before the guest has a network
    #[value(name = "openstack")]
    OpenStack,
    /// AWS's tree behind a session token, fetched before the guest has a network
    #[value(name = "ec2")]
    Ec2,
}

/// The expected results of a boot that found its dialect, besides the record's values.
#[derive(Debug)]
struct ExpectedBoot {
    /// The beginning of the name of cloud-init's datasource class.
    datasource: &'static str,
    /// The output of `cloud-id`.
    cloud_id: &'static str,
    /// The source of the NIC's configuration: the dialect, or cloud-init's own fallback, which is DHCP.
    network: NetworkSource,
    /// The requests that cloud-init must make, by method and target.
    asked: &'static [&'static str],
    /// Those of `asked` that cloud-init makes twice by itself. Any other repeated request is a retry.
    twice: &'static [&'static str],
    /// The request that is answered with a token. The token must not leave the guest.
    token: Option<&'static str>,
}

/// The source of cloud-init's network configuration, by the word in its log (`stages.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NetworkSource {
    /// DHCP on the first NIC, which cloud-init uses if no source has a configuration.
    Fallback,
    /// The datasource that cloud-init found.
    Datasource,
}

impl NetworkSource {
    fn word(self) -> &'static str {
        match self {
            Self::Fallback => "fallback",
            Self::Datasource => "ds",
        }
    }
}

/// Version 22.4 does not fetch network-config from a seed on the web.
const NOCLOUD: ExpectedBoot = ExpectedBoot {
    datasource: "DataSourceNoCloud",
    cloud_id: "nocloud",
    network: NetworkSource::Fallback,
    asked: &["GET /v1/meta-data", "GET /v1/user-data", "GET /v1/vendor-data"],
    twice: &[],
    token: None,
};

/// cloud-init requests `/openstack` to detect the service, and again to list its versions.
const OPENSTACK: ExpectedBoot = ExpectedBoot {
    datasource: "DataSourceOpenStack",
    cloud_id: "openstack",
    network: NetworkSource::Datasource,
    asked: &[
        "GET /openstack",
        "GET /openstack/2018-08-27/meta_data.json",
        "GET /openstack/2018-08-27/user_data",
        "GET /openstack/2018-08-27/vendor_data.json",
        "GET /openstack/2018-08-27/vendor_data2.json",
        "GET /openstack/2018-08-27/network_data.json",
        "GET /latest/meta-data/",
        "GET /latest/meta-data/instance-id",
    ],
    twice: &["GET /openstack"],
    token: None,
};

/// cloud-init requests `instance-id` to detect the version, and again as a leaf of the tree.
const EC2: ExpectedBoot = ExpectedBoot {
    datasource: "DataSourceEc2",
    cloud_id: "aws",
    network: NetworkSource::Datasource,
    asked: &[
        "PUT /latest/api/token",
        "GET /2021-03-23/meta-data/instance-id",
        "GET /2021-03-23/user-data",
        "GET /2021-03-23/meta-data/",
        "GET /2021-03-23/dynamic/instance-identity/document",
    ],
    twice: &["GET /2021-03-23/meta-data/instance-id"],
    token: Some("PUT /latest/api/token"),
};

impl BootDialect {
    /// Returns the dialect's name on the command line and in records.
    fn name(self) -> &'static str {
        match self {
            Self::NoCloud => "nocloud",
            Self::OpenStack => "openstack",
            Self::Ec2 => "ec2",
        }
    }

    /// Returns the expected results of a boot with this dialect.
    fn expected(self) -> &'static ExpectedBoot {
        match self {
            Self::NoCloud => &NOCLOUD,
            Self::OpenStack => &OPENSTACK,
            Self::Ec2 => &EC2,
        }
    }

    /// Returns the values of QEMU's `-smbios` option. They show one identity and no other.
    ///
    /// For EC2, `ds-identify` and `DataSourceEc2.py` (22.4) expect the serial to equal the UUID, and both to begin with
    /// `ec2`, as on AWS's own machines. systemd uses the vendor of the firmware.
    fn smbios(self, subject: &BootSubject) -> Vec<String> {
        let uuid = subject.uuid;
        match self {
            Self::NoCloud => vec![format!("type=1,uuid={uuid},serial={SEED}")],
            Self::OpenStack => vec![format!(
                "type=1,uuid={uuid},serial={uuid},manufacturer=OpenStack Foundation,product=OpenStack Nova"
            )],
            Self::Ec2 => vec![
                "type=0,vendor=Amazon EC2".to_owned(),
                format!("type=1,uuid={uuid},serial={uuid},manufacturer=Amazon EC2"),
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::{BootDialect, BootSubject};

    #[test]
    fn firmware_shows_one_identity_with_the_uuid_of_the_record() {
        let marks = [(BootDialect::NoCloud, "ds=nocloud"), (BootDialect::OpenStack, "OpenStack Nova")];
        let marks = [&marks[..], &[(BootDialect::Ec2, "serial=ec2")]].concat();
        for &dialect in BootDialect::value_variants() {
            let subject = BootSubject::of(dialect);
            let shown = dialect.smbios(&subject).join(" ");
            assert!(shown.contains(&format!("uuid={}", subject.uuid)), "{dialect:?}: {shown}");
            for &(other, mark) in &marks {
                assert_eq!(shown.contains(mark), other == dialect, "{dialect:?}: {shown}");
            }
        }
    }

    #[test]
    fn repeated_and_token_requests_are_among_the_expected_ones() {
        for dialect in BootDialect::value_variants() {
            let expected = dialect.expected();
            assert!(expected.twice.iter().all(|again| expected.asked.contains(again)), "{dialect:?}");
            assert!(expected.token.iter().all(|token| expected.asked.contains(token)), "{dialect:?}");
        }
    }
}
