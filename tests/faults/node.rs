//! A node with two guests, a state directory of its own file system, and what was acknowledged to the guests.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use metadata_control::status::{AgentStatus, StatusRequest, ask};
use serde_json::{Value, json};
use support::agent::{self, Agent, PortArgument};
use support::bpffs::Bpffs;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::netns::run;
use support::record::{Identity, replace};
use tempfile::TempDir;

/// Longest wait for something that must happen; only a failing test waits this long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Limit on one request during a fault.
pub(crate) const REQUEST: Duration = Duration::from_secs(20);
/// Size of the file system of the state directory.
const DISK: &str = "size=512k,mode=0700";
pub(crate) const METADATA: &str = "http://169.254.169.254";
const GOOGLE: &str = "Metadata-Flavor: Google";

/// A node. Its agents share pins, records and state.
pub(crate) struct Node {
    // Guests end before their host.
    pub(crate) guests: [Guest; 2],
    pub(crate) host: Host,
    pub(crate) bpffs: Bpffs,
    disk: Disk,
    pub(crate) records: TempDir,
}

/// A small file system for the state directory. Unmounted on drop.
struct Disk(PathBuf);

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily, because an agent that ends may still have a file open.
        if let Err(error) = run(Command::new("umount").arg("--lazy").arg(&self.0)) {
            eprintln!("cannot unmount {}: {error:#}", self.0.display());
        }
    }
}

impl Node {
    pub(crate) fn new() -> Result<Self> {
        let records = tempfile::tempdir()?;
        let state = records.path().join("state");
        fs::create_dir(&state)?;
        run(Command::new("mount").args(["-t", "tmpfs", "-o", DISK, "tmpfs"]).arg(&state))?;
        let disk = Disk(state);
        let host = Host::new()?;
        let identities = [Identity::of(0), Identity::of(1)];
        let guests =
            [Guest::boot(&host, &Spec::of(&identities[0]))?, Guest::boot(&host, &Spec::of(&identities[1]))?];
        let node = Self { guests, host, bpffs: Bpffs::mount()?, disk, records };
        node.write(0, 1, "red")?;
        node.write(1, 1, "red")?;
        Ok(node)
    }

    /// Writes a guest's record, with a one-shot password and a value to wait for.
    pub(crate) fn write(&self, guest: usize, generation: u64, colour: &str) -> Result<()> {
        let identity = self.guests[guest].identity();
        let mut record: Value = serde_json::from_str(&identity.record(generation))?;
        record["admin"] = json!({"password": format!("one-shot-{guest}")});
        record["metadata"] = json!({"colour": colour});
        replace(&identity.path(self.records.path()), &record.to_string())
    }

    pub(crate) fn agent(&self, more: &[&str]) -> Result<Agent<'_>> {
        let port = |guest: &Guest| PortArgument::new(guest.host_tap().name(), guest.identity().mac);
        let ports = self.guests.each_ref().map(port);
        let mut words = agent::arguments_with_pins(self.records.path(), &ports, &self.bpffs.pins());
        words.extend(more.iter().map(Into::into));
        Agent::start_binary(&agent::binary()?, self.host.ns(), words)
    }

    pub(crate) fn state(&self) -> &Path {
        &self.disk.0
    }

    /// The file with what a guest wrote.
    pub(crate) fn mailbox(&self, guest: usize) -> Result<PathBuf> {
        let uuid = &self.guests[guest].identity().instance_id;
        let found = fs::read_dir(self.state().join("vms"))?.filter_map(Result::ok).map(|entry| entry.path());
        let mut found = found.filter(|path| path.extension().is_some_and(|end| end == "json"));
        found.find(|path| path.to_string_lossy().contains(uuid.as_str())).context("no file of this guest")
    }

    /// Fills the state directory's file system.
    pub(crate) fn fill(&self) -> Result<PathBuf> {
        let path = self.state().join("filler");
        let mut file = fs::File::create(&path)?;
        for size in [4_096, 1] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
        Ok(path)
    }

    pub(crate) fn status(&self) -> Result<AgentStatus> {
        let mut command = Command::new(agent::binary()?);
        command.args(["status", "--json", "--run"]).arg(self.records.path().join("run"));
        let output = command.output()?;
        serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Sends a request to the agent's API; returns the status.
    pub(crate) fn api(&self, method: &str, path: &str, body: &str, patience: Duration) -> Result<u16> {
        let path = format!("/v1/instances{path}");
        let question =
            StatusRequest { method, path: &path, fields: &[], body: body.as_bytes(), timeout: patience };
        Ok(ask(&self.records.path().join("run"), &question)?.status)
    }

    /// Runs curl as a guest; returns status and body.
    pub(crate) fn curl(&self, guest: usize, words: &[&str]) -> Result<(u16, String)> {
        let fetched = self.guests[guest].curl(words, REQUEST)?;
        Ok((fetched.status, fetched.text()))
    }

    pub(crate) fn put_attribute(&self, guest: usize, key: &str, value: &str) -> Result<u16> {
        let url = format!("{METADATA}/computeMetadata/v1/instance/guest-attributes/faults/{key}");
        Ok(self.curl(guest, &["-X", "PUT", "-H", GOOGLE, "-d", value, &url])?.0)
    }

    pub(crate) fn attribute(&self, guest: usize, key: &str) -> Result<(u16, String)> {
        let url = format!("{METADATA}/computeMetadata/v1/instance/guest-attributes/faults/{key}");
        self.curl(guest, &["-H", GOOGLE, &url])
    }

    /// Posts the guest's password as OpenStack's guests do.
    pub(crate) fn post_password(&self, guest: usize, password: &str) -> Result<u16> {
        let url = format!("{METADATA}/openstack/2013-04-04/password");
        Ok(self.curl(guest, &["-d", password, &url])?.0)
    }

    pub(crate) fn posted_password(&self, guest: usize) -> Result<String> {
        Ok(self.curl(guest, &[&format!("{METADATA}/openstack/2013-04-04/password")])?.1)
    }

    /// Sends a word to CloudStack's password server.
    pub(crate) fn one_shot(&self, guest: usize, word: &str) -> Result<String> {
        let url = format!("{METADATA}:8080/");
        Ok(self.curl(guest, &["-H", &format!("DomU_Request: {word}"), &url])?.1)
    }

    /// Waits for a change of the value, for at most a minute.
    pub(crate) fn wait_for_colour(&self, guest: usize) -> Result<(u16, String)> {
        let url = format!(
            "{METADATA}/computeMetadata/v1/instance/attributes/colour?wait_for_change=true&timeout_sec=60"
        );
        let fetched = self.guests[guest].curl(&["-H", GOOGLE, &url], PATIENCE)?;
        Ok((fetched.status, fetched.text()))
    }

    /// Checks that a guest gets what is its own.
    pub(crate) fn assert_own(&self, guest: usize) -> Result<()> {
        self.guests[guest].fetch_own("/v1/user-data", REQUEST)?;
        let (status, text) = self.curl(guest, &[&format!("{METADATA}/v1/meta-data")])?;
        let own = &self.guests[guest].identity().instance_id;
        ensure!(status == 200 && text.contains(own.as_str()), "guest {guest} got {status}: {text}");
        Ok(())
    }
}
