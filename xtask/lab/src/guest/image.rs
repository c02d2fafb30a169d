//! Makes the guest's disk: Debian 12 by debootstrap, written to an ext4 file without mounting anything.

use anyhow::{Context as _, Result, bail, ensure};
use metadata_control::status::{AgentStatus, PortState};
use serde_json::json;
use std::fs;
use std::fs::{File, Permissions};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::agent::Agent;
use support::eventually;
use support::host::Host;
use support::libvirt::Libvirt;
use support::netns::run;
use support::{agent, host, libvirt};

use super::wire::{Finding, finding};
use super::{BootDialect, BootOutcome, BootSubject, KERNEL, MARKER, MEMORY_MIB, PROCESSORS, SEED, wire};

const SUITE: &str = "bookworm";
/// The mirror for machines whose apt has no source for [`SUITE`].
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";
/// The guest's packages, in addition to debootstrap's minbase.
const PACKAGES: &[&str] = &[
    "cloud-init",
    // For the unit that waits for events.
    "curl",
    // cloud-init depends on this one through virtual packages, which debootstrap does not resolve.
    "python3-cffi-backend",
    "ifupdown",
    "iproute2",
    "isc-dhcp-client",
    "linux-image-cloud-amd64",
    // Contains `route`. With ifupdown, cloud-init sets the default route of a static address by that command.
    "net-tools",
    "netbase",
    // For ssh-keygen, because a first boot makes host keys.
    "openssh-client",
    "sudo",
    "systemd-sysv",
    "udev",
    // Packs the initrd; an emulated processor unpacks gzip more slowly.
    "zstd",
];
/// Files that replace or complete those of the packages: path, mode, content.
const FILES: &[(&str, u32, &str)] = &[
    ("usr/local/sbin/boot-report", 0o755, include_str!("recipe/boot-report.py")),
    ("etc/systemd/system/boot-report.service", 0o644, include_str!("recipe/boot-report.service")),
    ("etc/cloud/cloud.cfg.d/90-guest.cfg", 0o644, include_str!("recipe/90-guest.cfg")),
    ("etc/default/locale", 0o644, "LANG=C.UTF-8\n"),
    ("etc/fstab", 0o644, "/dev/vda / ext4 defaults 0 0\n"),
    ("etc/hostname", 0o644, "unnamed\n"),
    // debootstrap leaves this machine's resolver configuration there. In its local stage, cloud-init looks up three or
    // four names before it requests metadata. A resolver that never answers costs 10 s for each.
    ("etc/resolv.conf", 0o644, "# None: questions are refused at once.\n"),
    ("etc/initramfs-tools/conf.d/guest", 0o644, "MODULES=list\nCOMPRESS=zstd\n"),
    ("etc/initramfs-tools/modules", 0o644, "virtio_pci\nvirtio_blk\next4\n"),
];
/// Units that take an emulated processor seconds and are unrelated to metadata.
const MASKED: &[&str] = &[
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty-static.service",
    "getty@tty1.service",
    "serial-getty@ttyS0.service",
    "serial-getty@ttyS1.service",
    "systemd-logind.service",
];
/// Directories removed from the disk: a third of its size, without effect on its behaviour.
const PRUNED: &[&str] = &["usr/share/doc", "usr/share/locale", "usr/share/man"];
/// The size of the disk. The file is sparse.
const DISK_SIZE: &str = "1500M";
/// The number of packages between two progress lines.
const PROGRESS_EVERY: u32 = 50;

/// A finished image: the files that a boot needs, in one directory.
#[derive(Debug)]
pub(super) struct DiskImage {
    directory: PathBuf,
}

impl DiskImage {
    /// Returns the path of the root file system. A boot never writes to it.
    pub(super) fn disk(&self) -> PathBuf {
        self.directory.join("disk.img")
    }

    /// Returns the path of the kernel from the guest's own package.
    pub(super) fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// Returns the path of the initrd that the package made.
    pub(super) fn initrd(&self) -> PathBuf {
        self.directory.join("initrd.img")
    }

    fn is_whole(&self) -> bool {
        [self.disk(), self.kernel(), self.initrd()].iter().all(|path| path.is_file())
    }
}

/// Returns the image of the current recipe below `cache`, and makes it if it is missing.
pub(super) fn ready(cache: &Path, rebuild: bool) -> Result<DiskImage> {
    let image = DiskImage { directory: cache.join(key()) };
    if image.is_whole() && !rebuild {
        return Ok(image);
    }
    let started = Instant::now();
    println!("image: making Debian {SUITE} in {} (once; takes some minutes)", image.directory.display());
    let work = cache.join(format!("work-{}", std::process::id()));
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let made = make(&work, cache);
    let kept = match made {
        Ok(()) => publish(&work, &image.directory),
        Err(error) => Err(error),
    };
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    }
    kept?;
    forget_others(cache, &image.directory)?;
    println!("image: made in {:.0} s", started.elapsed().as_secs_f64());
    Ok(image)
}

fn publish(work: &Path, directory: &Path) -> Result<()> {
    fs::remove_dir_all(work.join("tree"))?;
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::rename(work, directory)
        .with_context(|| format!("cannot rename the new directory to {}", directory.display()))
}

/// Removes images of other recipes: each takes hundreds of megabytes, and no boot will use them again.
fn forget_others(cache: &Path, kept: &Path) -> Result<()> {
    let ours = format!("{SUITE}-");
    for entry in fs::read_dir(cache)? {
        let path = entry?.path();
        let is_image = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&ours));
        if is_image && path != kept {
            fs::remove_dir_all(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Returns a name for the recipe, which changes with every change of the recipe.
fn key() -> String {
    let mut hasher = DefaultHasher::new();
    (SUITE, PACKAGES, FILES, MASKED, PRUNED, DISK_SIZE).hash(&mut hasher);
    format!("{SUITE}-{:016x}", hasher.finish())
}

fn make(work: &Path, cache: &Path) -> Result<()> {
    let tree = work.join("tree");
    debootstrap(&tree, cache)?;
    println!("image: adding the recipe's files");
    lay_over(&tree)?;
    run(Command::new("chroot").arg(&tree).args(["update-initramfs", "-u"]))?;
    for (link, name) in [("vmlinuz", "vmlinuz"), ("initrd.img", "initrd.img")] {
        fs::copy(tree.join(link), work.join(name)).with_context(|| format!("the tree has no {link}"))?;
    }
    println!("image: writing the file system");
    run(Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-L", "root", "-d"])
        .args([&tree, &work.join("disk.img")])
        .arg(DISK_SIZE))?;
    Ok(())
}

fn debootstrap(tree: &Path, cache: &Path) -> Result<()> {
    let packages = cache.join("packages");
    fs::create_dir_all(&packages)?;
    let packages = packages.canonicalize()?;
    let log_path = cache.join("debootstrap.log");
    let mut log = File::create(&log_path)?;
    // A mount namespace of its own removes debootstrap's mounts, even if debootstrap fails.
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "debootstrap", "--variant=minbase"]);
    command.arg(format!("--include={}", PACKAGES.join(",")));
    command.arg(format!("--cache-dir={}", packages.display()));
    command.arg(SUITE).arg(tree).arg(mirror());
    if let Some(proxy) = proxy() {
        command.env("http_proxy", proxy);
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log.try_clone()?)
        .spawn()
        .context("cannot run debootstrap")?;
    let stdout = child.stdout.take().context("standard output is not piped")?;
    let mut progress = BootProgress::default();
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        writeln!(log, "{line}")?;
        progress.see(&line);
    }
    let status = child.wait()?;
    if !status.success() {
        let text = fs::read_to_string(&log_path).unwrap_or_default();
        let lines: Vec<_> = text.lines().rev().take(5).collect();
        let tail: Vec<_> = lines.into_iter().rev().collect();
        bail!("debootstrap: {status}; {} ends with:\n{}", log_path.display(), tail.join("\n"));
    }
    Ok(())
}

/// Reduces debootstrap's line per package to one line per phase and per [`PROGRESS_EVERY`] packages.
#[derive(Debug, Default)]
struct BootProgress {
    phase: String,
    packages: u32,
}

impl BootProgress {
    fn see(&mut self, line: &str) {
        let Some(verb) = line.strip_prefix("I: ").and_then(|rest| rest.split(' ').next()) else { return };
        // debootstrap alternates between two verbs while it fetches; they count as one phase.
        let verb = if verb == "Validating" { "Retrieving" } else { verb };
        if verb == self.phase {
            self.packages += 1;
            if self.packages.is_multiple_of(PROGRESS_EVERY) {
                println!("image: {} … {}", verb.to_lowercase(), self.packages);
            }
        } else if ["Retrieving", "Extracting", "Unpacking", "Configuring"].contains(&verb) {
            verb.clone_into(&mut self.phase);
            self.packages = 1;
            println!("image: {} …", verb.to_lowercase());
        }
    }
}

/// Returns the mirror from which this machine's apt gets [`SUITE`].
fn mirror() -> String {
    let format = "$(REPO_URI) $(RELEASE) $(COMPONENT)";
    let mut command = Command::new("apt-get");
    command.args(["indextargets", "--format", format, "Created-By: Packages"]);
    let targets = run(&mut command).unwrap_or_default();
    let of_suite = targets.lines().find_map(|line| {
        let mut words = line.split(' ');
        let uri = words.next()?;
        (words.next() == Some(SUITE) && words.next() == Some("main")).then(|| uri.to_owned())
    });
    of_suite.unwrap_or_else(|| DEFAULT_MIRROR.to_owned())
}

/// Returns apt's HTTP proxy on this machine, if it has one.
fn proxy() -> Option<String> {
    let output =
        run(Command::new("apt-config").args(["dump", "--format", "%v", "Acquire::http::Proxy"])).ok()?;
    let proxy = output.trim();
    (!proxy.is_empty() && proxy != "DIRECT").then(|| proxy.to_owned())
}

fn lay_over(tree: &Path) -> Result<()> {
    for (path, mode, content) in FILES {
        let path = tree.join(path);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(&path, Permissions::from_mode(*mode))?;
    }
    let units = tree.join("etc/systemd/system");
    for unit in MASKED {
        let path = units.join(unit);
        if path.symlink_metadata().is_ok() {
            fs::remove_file(&path)?;
        }
        symlink("/dev/null", &path).with_context(|| format!("cannot mask {unit}"))?;
    }
    let wants = units.join("cloud-init.target.wants");
    fs::create_dir_all(&wants)?;
    symlink("/etc/systemd/system/boot-report.service", wants.join("boot-report.service"))?;
    for pruned in PRUNED {
        let path = tree.join(pruned);
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

// Boots the same guest as a domain of Debian's libvirt, whose hook makes its record.
//
// The record comes from the domain's metadata and from a file named by the domain's UUID. libvirtd is restarted while
// the guest boots, and the domain is destroyed once the guest has reported. Neither may leave anything behind or
// remove anything that is still needed.

/// The longest time the agent may take to notice a record.
const NOTICE: Duration = Duration::from_secs(10);
/// Interval at which the domain's state is checked.
const STATE_INTERVAL: Duration = Duration::from_secs(2);
/// A slot of the machine's bus that libvirt leaves free. libvirt does not know of the disk.
const DISK_SLOT: &str = "0x10";
/// The number of timed calls of the hook, of each kind.
const CALLS: usize = 50;

/// A node on which libvirt starts the guest.
struct LibvirtNode<'a> {
    subject: &'a BootSubject,
    agent: &'a Path,
    directory: &'a Path,
    run: PathBuf,
    files: PathBuf,
}

/// Boots the image as a domain. All processes that it started have ended when it returns.
pub(super) fn boot(
    image: &DiskImage,
    subject: &BootSubject,
    agent: &Path,
    directory: &Path,
    patience: Duration,
) -> Result<(BootOutcome, Vec<Finding>)> {
    let node = prepared(subject, agent, directory)?;
    let host = Host::new()?;
    let _dhcp = super::dhcp(host.ns(), subject, directory)?;
    let hook = libvirt::hook(agent, &node.run, &node.files);
    let mut libvirt = Libvirt::start(host.ns(), &hook)?;
    let agent = Agent::start_binary(agent, host.ns(), agent::arguments(&directory.join("records"), &[]))?;
    let before = agent.metrics()?;

    let accelerator = super::accelerator();
    println!("guest: booting for {} by libvirt under {accelerator}", subject.dialect.name());
    let started = Instant::now();
    libvirt.boot(subject.hostname, &node.domain(image, accelerator))?;
    let taken = started.elapsed();
    let (tap, attached) = node.attached(started)?;
    libvirt.restart()?;
    let mut checked = Instant::now();
    let ended = || {
        if checked.elapsed() < STATE_INTERVAL {
            return Ok(None);
        }
        checked = Instant::now();
        let state = libvirt.virsh(&["domstate", "--reason", subject.hostname])?;
        Ok((!state.starts_with("running")).then_some(state))
    };
    let waited = super::wait(ended, directory, patience);
    let metrics = (before, agent.metrics()?);
    fs::write(directory.join("agent.log"), agent.log())?;
    let (report, reported) = waited?;
    let mut findings =
        vec![finding("libvirt", &format!("started the domain in {} ms", taken.as_millis()), true)];
    findings.push(finding(
        "tap",
        &format!("{tap}, attached {} ms after the start began", attached.as_millis()),
        true,
    ));
    let xml = libvirt.virsh(&["dumpxml", subject.hostname])?;
    findings.push(node.end(&libvirt)?);
    drop(libvirt);
    findings.push(node.calls(&xml)?);
    let traffic = wire::read(&fs::read(directory.join("wire.pcap"))?, subject.mac)?;
    let status = agent.stop()?;
    ensure!(status.success(), "the agent ended with {status}; see agent.log in {}", directory.display());
    let time = reported.duration_since(started);
    let outcome =
        BootOutcome { report, time, accelerator, traffic, metrics, directory: directory.to_owned() };
    Ok((outcome, findings))
}

/// Empties the directory and writes the file that is named by the domain's UUID.
fn prepared<'a>(subject: &'a BootSubject, agent: &'a Path, directory: &'a Path) -> Result<LibvirtNode<'a>> {
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| format!("cannot empty {}", directory.display()))?;
    }
    let records = directory.join("records");
    let (run, files) = (records.join("run"), directory.join("files"));
    for room in [&records, &files] {
        fs::create_dir_all(room).with_context(|| format!("cannot make {}", room.display()))?;
    }
    let node = LibvirtNode { subject, agent, directory, run, files };
    let beside = node.files.join(format!("{}.yaml", subject.uuid));
    fs::write(&beside, node.beside())?;
    fs::set_permissions(&beside, Permissions::from_mode(0o640))?;
    Ok(node)
}

impl LibvirtNode<'_> {
    fn record(&self) -> PathBuf {
        self.run.join("hook.d").join(format!("{}.json", self.subject.uuid))
    }

    /// Returns the content of the file that is named by the domain's UUID.
    fn beside(&self) -> String {
        let BootSubject { ec2_id, ssh_key, mac, .. } = self.subject;
        let part = json!({
            "vm": {"ec2_id": ec2_id},
            "ssh_keys": [{"name": "default", "key": ssh_key}],
            "network": {"nics": [{"mac": mac.to_string(), "name": "eth0", "mtu": 1500}]},
            "serve": {"smbios": self.subject.dialect.name(), "imdsv2": self.subject.imdsv2()},
        });
        format!("{part:#}\n")
    }

    /// Returns the domain's XML, with the rest of the record in its metadata.
    fn domain(&self, image: &DiskImage, accelerator: &str) -> String {
        let BootSubject { uuid, hostname, mac, marker, .. } = self.subject;
        let place = |name: &str| self.directory.join(name).display().to_string();
        let address = self.subject.address_entry();
        let address = ["method", "address", "gateway"]
            .map(|field| format!("{field}='{}'", address[field].as_str().unwrap_or_default()))
            .join(" ");
        let (kind, cpu) = match accelerator {
            "kvm" => ("kvm", "<cpu mode='host-passthrough'/>"),
            _ => ("qemu", "<cpu match='exact' check='none'><model>qemu64</model></cpu>"),
        };
        let (namespace, bridge, sysinfo) = (libvirt::NAMESPACE, host::BRIDGE, sysinfo(self.subject));
        let (kernel, initrd, disk) = (image.kernel(), image.initrd(), image.disk());
        let (kernel, initrd, disk) = (kernel.display(), initrd.display(), disk.display());
        let (console, report, dump) = (place("console.log"), place("report.json"), place("wire.pcap"));
        // Writes go to a temporary overlay, and QEMU dumps the NIC. libvirt's XML can express neither.
        format!(
            "<domain type='{kind}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{hostname}</name>
  <uuid>{uuid}</uuid>
  <metadata>
    <imds:instance xmlns:imds='{namespace}'>
      <imds:hostname>{hostname}.lab.internal</imds:hostname>
      <imds:project id='lab' number='1' account='000000000000'/>
      <imds:user-data><![CDATA[
#cloud-config
runcmd:
- [sh, -c, \"echo {marker} > {MARKER}\"]
]]></imds:user-data>
      <imds:address mac='{mac}' {address}/>
      <imds:meta key='role'>guest</imds:meta>
    </imds:instance>
  </metadata>
  <memory unit='MiB'>{MEMORY_MIB}</memory>
  <vcpu>{PROCESSORS}</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>{KERNEL}</cmdline>
    <smbios mode='sysinfo'/>
  </os>
  <sysinfo type='smbios'>{sysinfo}</sysinfo>
  <features><acpi/></features>
  {cpu}
  <devices>
    <interface type='bridge'>
      <mac address='{mac}'/>
      <source bridge='{bridge}'/>
      <model type='virtio'/>
      <rom enabled='no'/>
    </interface>
    <serial type='file'><source path='{console}'/><target port='0'/></serial>
    <serial type='file'><source path='{report}'/><target port='1'/></serial>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
    <memballoon model='none'/>
  </devices>
  <qemu:commandline>
    <qemu:arg value='-drive'/><qemu:arg value='file={disk},if=none,id=disk0,format=raw,snapshot=on'/>
    <qemu:arg value='-device'/><qemu:arg value='virtio-blk-pci,drive=disk0,addr={DISK_SLOT}'/>
    <qemu:arg value='-object'/><qemu:arg value='filter-dump,id=wire,netdev=hostnet0,file={dump}'/>
  </qemu:commandline>
</domain>
"
        )
    }

    fn status(&self) -> Result<AgentStatus> {
        let mut command = Command::new(self.agent);
        let output = command.args(["status", "--all", "--json", "--run"]).arg(&self.run).output()?;
        serde_json::from_slice(&output.stdout).context("cannot parse the agent's status")
    }

    /// Returns the guest's tap, and the time from the start of the domain until the agent attached the tap.
    fn attached(&self, started: Instant) -> Result<(String, Duration)> {
        let tap = eventually(NOTICE, || {
            let ports = self.status()?.ports.listed;
            let port = ports.iter().find(|port| port.state == PortState::Attached);
            port.map(|port| port.name.clone()).with_context(|| format!("no port is attached: {ports:?}"))
        })?;
        Ok((tap, started.elapsed()))
    }

    /// Times the hook with the running domain: with an unchanged record, and with a record to make.
    fn calls(&self, xml: &str) -> Result<Finding> {
        let run = self.directory.join("timed");
        let anew = self.timed(xml, &run, |run| match fs::remove_dir_all(run) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        })?;
        let known = self.timed(xml, &run, |_| Ok(()))?;
        let found = format!("a call takes {known} with an unchanged record, {anew} to make the record");
        Ok(finding("hook", &found, true))
    }

    /// Returns the median and the longest time of [`CALLS`] calls.
    fn timed(&self, xml: &str, run: &Path, before: impl Fn(&Path) -> Result<()>) -> Result<String> {
        let mut took = Vec::new();
        for _ in 0..CALLS {
            before(run)?;
            let started = Instant::now();
            let mut command = Command::new(self.agent);
            command.args(["libvirt-hook", "--run"]).arg(run).arg("--files").arg(&self.files);
            command.args(["--", self.subject.hostname, "reconnect", "begin", "-"]);
            let mut child =
                command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
            child.stdin.take().context("standard input is not piped")?.write_all(xml.as_bytes())?;
            let output = child.wait_with_output()?;
            took.push(started.elapsed());
            ensure!(
                output.status.success() && output.stdout.is_empty(),
                "the hook failed or printed something: {output:?}"
            );
        }
        took.sort_unstable();
        let [median, longest] = [took[CALLS / 2], took[CALLS - 1]].map(|took| took.as_secs_f64() * 1e3);
        Ok(format!("{median:.1} ms (at most {longest:.1})"))
    }

    /// Destroys the domain and checks that its record and its port disappear.
    fn end(&self, libvirt: &Libvirt) -> Result<Finding> {
        let there = self.record().exists();
        libvirt.virsh(&["destroy", self.subject.hostname])?;
        let gone = !self.record().exists();
        let ports = eventually(NOTICE, || {
            let ports = self.status()?.ports.listed;
            ensure!(ports.is_empty(), "{ports:?}");
            Ok(())
        });
        let record = match (there, gone) {
            (true, true) => "record removed",
            (true, false) => "record still there",
            (false, _) => "record missing before the domain was destroyed",
        };
        let port = ports.as_ref().map_or_else(|error| format!("{error:#}"), |()| "port removed".to_owned());
        Ok(finding("destroyed", &format!("{record}, {port}"), there && gone && ports.is_ok()))
    }
}

/// Returns the same identity as [`BootDialect::smbios`], as XML of libvirt.
fn sysinfo(subject: &BootSubject) -> String {
    let entry = |name: &str, value: &str| format!("<entry name='{name}'>{value}</entry>");
    let uuid = entry("uuid", subject.uuid);
    let system = match subject.dialect {
        BootDialect::NoCloud => entry("serial", SEED),
        BootDialect::OpenStack => [
            entry("manufacturer", "OpenStack Foundation"),
            entry("product", "OpenStack Nova"),
            entry("serial", subject.uuid),
        ]
        .concat(),
        BootDialect::Ec2 => [entry("manufacturer", "Amazon EC2"), entry("serial", subject.uuid)].concat(),
    };
    let bios = match subject.dialect {
        BootDialect::Ec2 => format!("<bios>{}</bios>", entry("vendor", "Amazon EC2")),
        _ => String::new(),
    };
    format!("{bios}<system>{system}{uuid}</system>")
}
