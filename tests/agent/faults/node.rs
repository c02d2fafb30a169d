//! A node with two guests, a state directory of its own file system, and what was acknowledged to the guests.

use anyhow::{Context as _, Result, ensure};
use metadata_content::token::{CLOCK_BACK_SECONDS, Keyring, TokenKeys, TokenKind};
use metadata_control::status::{AgentStatus, StatusRequest, ask};
use metadata_feed::state::token_file;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::agent::{self, Agent, PortArgument};
use support::bpffs::Bpffs;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::netns::run;
use support::objects::detach_pinned;
use support::process::signal;
use support::record::{Identity, replace};
use support::seed;
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
        let question = StatusRequest { method, path: &path, fields: &[], body: body.as_bytes(), patience };
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

// The faults, each of which begins and ends.

/// A fault of the node that passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The file system of the state directory is full (ENOSPC).
    FullDisk,
    /// The file system of the state directory is read-only (EROFS).
    ReadOnlyDisk,
    /// The agent gets no more descriptors (EMFILE).
    NoDescriptors,
    /// The agent is stopped (SIGSTOP).
    Stopped,
    /// The bpffs is read-only.
    ReadOnlyBpffs,
    /// Somebody has detached the programs of all ports.
    DetachedLinks,
}

impl Fault {
    /// All faults.
    pub(crate) const ALL: [Self; 6] = [
        Self::FullDisk,
        Self::ReadOnlyDisk,
        Self::NoDescriptors,
        Self::Stopped,
        Self::ReadOnlyBpffs,
        Self::DetachedLinks,
    ];

    /// Whether guests are answered while it lasts.
    pub(crate) fn answers(self) -> bool {
        !matches!(self, Self::Stopped | Self::DetachedLinks)
    }

    /// Whether what guests write stays off the disk while it lasts.
    pub(crate) fn blocks_writes(self) -> bool {
        matches!(self, Self::FullDisk | Self::ReadOnlyDisk)
    }

    /// Begins the fault for the agent with this process id.
    pub(crate) fn begin(self, node: &Node, pid: u32) -> Result<Begun> {
        let process = Pid::from_raw(i32::try_from(pid)?);
        Ok(match self {
            Self::FullDisk => Begun::Filler(node.fill()?),
            Self::ReadOnlyDisk => remounted(node.state().to_owned())?,
            Self::ReadOnlyBpffs => remounted(node.bpffs.path().to_owned())?,
            Self::NoDescriptors => {
                let open = fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
                let limits = rustix::process::getrlimit(Resource::Nofile);
                let lower = Rlimit { current: Some(open), maximum: limits.maximum };
                Begun::Limit(process, prlimit(process, Resource::Nofile, lower)?)
            }
            Self::Stopped => {
                signal(pid, libc::SIGSTOP)?;
                Begun::Stopped(pid)
            }
            Self::DetachedLinks => {
                for link in node.bpffs.port_links() {
                    let path = node.bpffs.pins().join("v1/links").join(link);
                    detach_pinned(&path)?;
                }
                Begun::Detached(pid)
            }
        })
    }
}

fn remounted(path: PathBuf) -> Result<Begun> {
    run(Command::new("mount").args(["-o", "remount,ro"]).arg(&path))?;
    Ok(Begun::ReadOnly(path))
}

/// A fault that lasts. It ends on drop.
pub(crate) enum Begun {
    Filler(PathBuf),
    ReadOnly(PathBuf),
    Limit(Option<Pid>, Rlimit),
    Stopped(u32),
    Detached(u32),
}

impl Begun {
    fn end(&self) -> Result<()> {
        match self {
            Self::Filler(path) => fs::remove_file(path).context("the filler")?,
            Self::ReadOnly(path) => _ = run(Command::new("mount").args(["-o", "remount,rw"]).arg(path))?,
            // The agent may have ended meanwhile.
            Self::Limit(process, limit) => _ = prlimit(*process, Resource::Nofile, *limit),
            Self::Stopped(pid) => _ = signal(*pid, libc::SIGCONT),
            // Begins a comparison at once, instead of within a minute.
            Self::Detached(pid) => _ = signal(*pid, libc::SIGHUP),
        }
        Ok(())
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("a fault does not end: {error:#}");
        }
    }
}

// The node's clock jumps. The agent reads it in three places, and each gets the time as a number: tokens, the age of
// keys, and requests. A test cannot change the clock of the machine, so these are given the steps.

const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
const NOW: u64 = 1_790_000_000;
const HOUR: u64 = 3_600;
const YEAR: u64 = 365 * 86_400;
const MONTH: Duration = Duration::from_secs(30 * 86_400);
const KINDS: [TokenKind; 3] = [TokenKind::Aws, TokenKind::AliYun, TokenKind::Akamai];

#[test]
fn tokens_stay_valid_over_small_steps_of_the_clock() {
    let keyring = Keyring::ephemeral();
    let mut rng = fastrand::Rng::with_seed(seed());
    for round in 0..10_000 {
        let kind = KINDS[rng.usize(..KINDS.len())];
        let ttl = kind.longest_ttl_seconds();
        let token = keyring.mint(kind, VM, ttl, NOW);
        let back = rng.u64(0..=CLOCK_BACK_SECONDS);
        let ahead = rng.u64(0..u64::from(ttl));
        for now in [NOW - back, NOW + ahead] {
            assert!(keyring.verify(kind, VM, token.as_bytes(), now), "round {round}: {kind:?} at {now}");
        }
    }
}

#[test]
fn a_token_or_key_made_while_the_clock_was_years_ahead_is_not_used_for_years() {
    let room = tempfile::tempdir().expect("a directory");
    let path = room.path().join("token.key");
    for kind in KINDS {
        let ahead = token_file::open(&path, NOW + YEAR).expect("keys");
        let token = ahead.mint(kind, VM, 600, NOW + YEAR);
        assert!(ahead.verify(kind, VM, token.as_bytes(), NOW + YEAR));
        assert!(!ahead.verify(kind, VM, token.as_bytes(), NOW), "{kind:?}: the token outlives the step");
        assert!(
            token_file::rotate_if_older(&ahead, &path, MONTH, NOW).expect("rotated"),
            "{kind:?}: the key stays"
        );
        let fresh = ahead.mint(kind, VM, 600, NOW);
        assert!(ahead.verify(kind, VM, fresh.as_bytes(), NOW), "{kind:?}: no token works after the step");
        fs::remove_file(&path).expect("removed");
    }
}

#[test]
fn a_former_key_is_not_accepted_for_years_after_the_clock_stepped_back() {
    let stolen = Keyring::with(TokenKeys::new(NOW));
    let keyring = Keyring::with(stolen.keys().rotated(NOW + YEAR));
    let token = stolen.mint(TokenKind::Aws, VM, 600, NOW);
    assert!(!keyring.verify(TokenKind::Aws, VM, token.as_bytes(), NOW), "the former key is accepted");
}

#[test]
fn any_walk_of_the_clock_leaves_keys_that_work_and_rotate() {
    let room = tempfile::tempdir().expect("a directory");
    let path = room.path().join("token.key");
    let mut rng = fastrand::Rng::with_seed(seed());
    let mut now = NOW;
    let keyring = token_file::open(&path, now).expect("keys");
    for step in 0..400 {
        let by = match rng.u8(..4) {
            0 => rng.u64(..10),
            1 => rng.u64(..HOUR),
            2 => rng.u64(..MONTH.as_secs() * 2),
            _ => rng.u64(..20 * YEAR),
        };
        now = if rng.bool() { now.saturating_add(by) } else { now.saturating_sub(by) };
        token_file::rotate_if_older(&keyring, &path, MONTH, now)
            .unwrap_or_else(|error| panic!("step {step}: {error}"));
        assert!(!keyring.keys().older_than(MONTH, now), "step {step}: an old key stays at {now}");
        let again = token_file::open(&path, now).expect("keys");
        for kind in KINDS {
            let token = keyring.mint(kind, VM, 60, now);
            assert!(keyring.verify(kind, VM, token.as_bytes(), now), "step {step}: {kind:?} at {now}");
            assert!(again.verify(kind, VM, token.as_bytes(), now), "step {step}: {kind:?} is not on disk");
        }
    }
}
