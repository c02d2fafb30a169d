//! Boots the same guest as a domain of Debian's libvirt, whose hook makes its record.
//!
//! The record comes from the domain's metadata and from a file named by the domain's UUID. libvirtd is restarted while
//! the guest boots, and the domain is destroyed once the guest has reported. Neither may leave anything behind or
//! remove anything that is still needed.

use super::boot::{self, KERNEL, MEMORY_MIB, Outcome, PROCESSORS};
use super::findings::{Finding, finding};
use super::image::Image;
use super::subject::{Dialect, SEED};
use super::subject::{MARKER, Subject};
use super::wire;
use anyhow::{Context as _, Result, ensure};
use metadata_control::status::{AgentStatus, PortState};
use serde_json::json;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::agent::{self, Agent};
use support::eventually::eventually;
use support::host::{self, Host};
use support::libvirt::{self, Libvirt};

/// The longest time the agent may take to notice a record.
const NOTICE: Duration = Duration::from_secs(10);
/// Interval at which the domain's state is checked.
const STATE_INTERVAL: Duration = Duration::from_secs(2);
/// A slot of the machine's bus that libvirt leaves free. libvirt does not know of the disk.
const DISK_SLOT: &str = "0x10";
/// The number of timed calls of the hook, of each kind.
const CALLS: usize = 50;

/// A node on which libvirt starts the guest.
struct Node<'a> {
    subject: &'a Subject,
    agent: &'a Path,
    directory: &'a Path,
    run: PathBuf,
    files: PathBuf,
}

/// Boots the image as a domain. All processes that it started have ended when it returns.
pub(super) fn boot(
    image: &Image,
    subject: &Subject,
    agent: &Path,
    directory: &Path,
    patience: Duration,
) -> Result<(Outcome, Vec<Finding>)> {
    let node = prepared(subject, agent, directory)?;
    let host = Host::new()?;
    let _dhcp = boot::dhcp(host.ns(), subject, directory)?;
    let hook = libvirt::hook(agent, &node.run, &node.files);
    let mut libvirt = Libvirt::start(host.ns(), &hook)?;
    let agent = Agent::start_binary(agent, host.ns(), agent::arguments(&directory.join("records"), &[]))?;
    let before = agent.metrics()?;

    let accelerator = boot::accelerator();
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
    let waited = boot::wait(ended, directory, patience);
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
    // The domain is destroyed at once, because the guest powers itself off after its report.
    findings.push(node.end(&libvirt)?);
    drop(libvirt);
    findings.push(node.calls(&xml)?);
    let traffic = wire::read(&fs::read(directory.join("wire.pcap"))?, subject.mac)?;
    let status = agent.stop()?;
    ensure!(status.success(), "the agent ended with {status}; see agent.log in {}", directory.display());
    let time = reported.duration_since(started);
    let outcome = Outcome { report, time, accelerator, traffic, metrics, directory: directory.to_owned() };
    Ok((outcome, findings))
}

/// Empties the directory and writes the file that is named by the domain's UUID.
fn prepared<'a>(subject: &'a Subject, agent: &'a Path, directory: &'a Path) -> Result<Node<'a>> {
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| format!("cannot empty {}", directory.display()))?;
    }
    let records = directory.join("records");
    let (run, files) = (records.join("run"), directory.join("files"));
    for room in [&records, &files] {
        fs::create_dir_all(room).with_context(|| format!("cannot make {}", room.display()))?;
    }
    let node = Node { subject, agent, directory, run, files };
    let beside = node.files.join(format!("{}.yaml", subject.uuid));
    fs::write(&beside, node.beside())?;
    fs::set_permissions(&beside, fs::Permissions::from_mode(0o640))?;
    Ok(node)
}

impl Node<'_> {
    fn record(&self) -> PathBuf {
        self.run.join("hook.d").join(format!("{}.json", self.subject.uuid))
    }

    /// Returns the content of the file that is named by the domain's UUID.
    fn beside(&self) -> String {
        let Subject { ec2_id, ssh_key, mac, .. } = self.subject;
        let part = json!({
            "vm": {"ec2_id": ec2_id},
            "ssh_keys": [{"name": "default", "key": ssh_key}],
            "network": {"nics": [{"mac": mac.to_string(), "name": "eth0", "mtu": 1500}]},
            "serve": {"smbios": self.subject.dialect.name(), "imdsv2": self.subject.imdsv2()},
        });
        format!("{part:#}\n")
    }

    /// Returns the domain's XML, with the rest of the record in its metadata.
    fn domain(&self, image: &Image, accelerator: &str) -> String {
        let Subject { uuid, hostname, mac, marker, .. } = self.subject;
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

/// Returns the same identity as [`Dialect::smbios`], as XML of libvirt.
fn sysinfo(subject: &Subject) -> String {
    let entry = |name: &str, value: &str| format!("<entry name='{name}'>{value}</entry>");
    let uuid = entry("uuid", subject.uuid);
    let system = match subject.dialect {
        Dialect::NoCloud => entry("serial", SEED),
        Dialect::OpenStack => [
            entry("manufacturer", "OpenStack Foundation"),
            entry("product", "OpenStack Nova"),
            entry("serial", subject.uuid),
        ]
        .concat(),
        Dialect::Ec2 => [entry("manufacturer", "Amazon EC2"), entry("serial", subject.uuid)].concat(),
    };
    let bios = match subject.dialect {
        Dialect::Ec2 => format!("<bios>{}</bios>", entry("vendor", "Amazon EC2")),
        _ => String::new(),
    };
    format!("{bios}<system>{system}{uuid}</system>")
}
