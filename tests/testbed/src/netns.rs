//! Network namespaces that are removed on drop.
//!
//! Names are `xdp-imds-<label>-<pid>-<n>` under `/run/netns`. `ip netns exec NAME` enters the namespace of a hanging
//! test. The next run removes the namespaces of processes that have ended ([`sweep`]).
#![expect(unsafe_code, reason = "setns has no safe form in std")]

use anyhow::{Context as _, Result, bail};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// iproute2's directory of named namespaces.
pub const RUN_NETNS: &str = "/run/netns";
const PREFIX: &str = "xdp-imds-";

/// A named network namespace with its loopback up.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    file: File,
    /// Whether drop removes the name.
    owned: bool,
}

impl Namespace {
    /// Creates a namespace for this process; removed on drop, or by [`sweep`] if this process dies.
    ///
    /// # Errors
    /// Fails if `ip netns add` fails: not root, or no iproute2.
    pub fn new(label: &str) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        static SWEEP: Once = Once::new();
        SWEEP.call_once(sweep);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut made = Self::create(&format!("{PREFIX}{label}-{}-{n}", std::process::id()))?;
        made.owned = true;
        Ok(made)
    }

    /// Creates a namespace that stays until [`Namespace::remove`], for a lab that outlives its command.
    ///
    /// # Errors
    /// Like [`Namespace::new`]; also fails if the name is taken.
    pub fn create(name: &str) -> Result<Self> {
        run(Command::new("ip").args(["netns", "add", name]))?;
        let ns = Self::open(name)?;
        ns.ip("link set lo up")?;
        Ok(ns)
    }

    /// Opens an existing named namespace; drop does not remove it.
    ///
    /// # Errors
    /// Fails if there is no namespace of that name.
    pub fn open(name: &str) -> Result<Self> {
        let path = Path::new(RUN_NETNS).join(name);
        let file = File::open(&path).with_context(|| format!("no namespace at {}", path.display()))?;
        Ok(Self { name: name.to_owned(), file, owned: false })
    }

    /// Removes the name now; the namespace ends when nothing uses it any more.
    ///
    /// # Errors
    /// Fails if `ip netns del` fails.
    pub fn remove(mut self) -> Result<()> {
        self.owned = false;
        delete(&self.name)
    }

    /// The name under `/run/netns`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path of the namespace's file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        Path::new(RUN_NETNS).join(&self.name)
    }

    /// Runs `f` on a thread inside this namespace and returns its result; sockets it opens stay in the namespace.
    ///
    /// # Panics
    /// Propagates a panic of `f`; panics if the kernel refuses to enter the namespace.
    pub fn run_in<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let fd = self.file.as_raw_fd();
        let name = &self.name;
        // The thread has the caller's name, so that a panic message contains the test's name.
        let thread =
            std::thread::Builder::new().name(std::thread::current().name().unwrap_or("netns").to_owned());
        std::thread::scope(|scope| {
            let run = move || {
                // SAFETY: `file` stays open while `self` is borrowed; setns moves only this thread, which ends with the
                // scope.
                let rc = unsafe { libc::setns(fd, libc::CLONE_NEWNET) };
                assert!(rc == 0, "setns into {name} failed: {}", std::io::Error::last_os_error());
                f()
            };
            let handle = thread.spawn_scoped(scope, run).expect("threads can be started");
            handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Starts a program inside this namespace. A child process inherits the namespace of the thread that starts it.
    ///
    /// # Errors
    /// Fails if the program cannot be started.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        let program = command.get_program().to_owned();
        self.run_in(|| command.spawn())
            .with_context(|| format!("cannot start {} in {}", program.display(), self.name))
    }

    /// Runs a program inside this namespace until it ends. Returns its output, whatever its exit code.
    ///
    /// # Errors
    /// Fails if the program cannot be started.
    pub fn output(&self, command: &mut Command) -> Result<Output> {
        let program = command.get_program().to_owned();
        self.run_in(|| command.stdin(Stdio::null()).output())
            .with_context(|| format!("cannot run {} in {}", program.display(), self.name))
    }

    /// Runs `ip` with these arguments inside this namespace. Returns its standard output.
    ///
    /// # Errors
    /// Fails if `ip` fails; the error contains the arguments and its standard error.
    pub fn ip(&self, words: &str) -> Result<String> {
        self.run_in(|| run(Command::new("ip").args(words.split_whitespace())))
            .with_context(|| format!("in namespace {}", self.name))
    }

    /// The output of `ip -j link` without the fields that the kernel updates late: a bridge's carrier changes some time
    /// after that of its ports.
    ///
    /// # Errors
    /// Like [`Namespace::ip`].
    pub fn links(&self) -> Result<Vec<serde_json::Value>> {
        let mut links: Vec<serde_json::Value> = serde_json::from_str(&self.ip("-j link")?)?;
        for link in &mut links {
            link["operstate"].take();
            let flags = link["flags"].as_array_mut().context("a link without flags")?;
            flags.retain(|flag| flag != "LOWER_UP" && flag != "NO-CARRIER");
        }
        Ok(links)
    }

    /// Runs many `ip` commands, one per line, in one process. This sets up hundreds of taps quickly.
    ///
    /// # Errors
    /// Fails if one of them fails.
    pub fn ip_batch(&self, lines: &str) -> Result<()> {
        let mut child = self.spawn(
            Command::new("ip")
                .args(["-batch", "-"])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped()),
        )?;
        let mut stdin = child.stdin.take().expect("stdin is piped");
        let lines = lines.to_owned();
        let feeder = std::thread::spawn(move || stdin.write_all(lines.as_bytes()));
        let output = child.wait_with_output()?;
        // If `ip` fails, it closes the pipe early. Its own message explains more than the error of the pipe.
        let fed = feeder.join().expect("the feeding thread does not panic");
        if !output.status.success() {
            bail!("ip -batch in {}: {}", self.name, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(fed?)
    }

    /// Sets a value below `/proc/sys/net` in this namespace, e.g. `ipv4/ip_forward`.
    ///
    /// # Errors
    /// Fails if the kernel has no such setting or refuses the value.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<()> {
        let path = Path::new("/proc/sys/net").join(name);
        self.run_in(|| std::fs::write(&path, value))
            .with_context(|| format!("cannot set {} in {}", path.display(), self.name))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if self.owned
            && let Err(error) = delete(&self.name)
        {
            eprintln!("cannot remove namespace {}: {error:#}", self.name);
        }
    }
}

/// Removes namespaces of earlier runs whose process is no longer alive, and no others.
pub fn sweep() {
    let Ok(entries) = std::fs::read_dir(RUN_NETNS) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(owner) else { continue };
        if !Path::new("/proc").join(pid.to_string()).exists()
            && let Err(error) = delete(&name.to_string_lossy())
        {
            eprintln!("cannot remove left-over namespace {}: {error:#}", name.display());
        }
    }
}

/// The process id in the name of a namespace, if the name has the form of this module.
fn owner(name: &str) -> Option<u32> {
    let mut parts = name.strip_prefix(PREFIX)?.rsplitn(3, '-');
    parts.next()?.parse::<u32>().ok()?;
    parts.next()?.parse().ok()
}

fn delete(name: &str) -> Result<()> {
    run(Command::new("ip").args(["netns", "del", name])).map(drop)
}

/// Runs a program in the caller's namespace until it ends; returns its standard output.
///
/// # Errors
/// Fails if it cannot start or its exit code is not 0; the error contains its standard error.
pub fn run(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}").replace('"', "");
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {shown}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{shown}: {}: {}", output.status, stderr.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::{Namespace, owner};
    use crate::privileged;

    #[test]
    fn only_our_own_names_have_an_owner() {
        assert_eq!(owner("xdp-imds-host-4242-0"), Some(4242));
        assert_eq!(owner("xdp-imds-two-words-7-12"), Some(7));
        for other in ["cni-1234-0", "xdp-imds-lab", "xdp-imds-host-x-0", "xdp-imds-host-7-x"] {
            assert_eq!(owner(other), None, "{other}");
        }
    }

    #[privileged::test]
    fn a_namespace_is_removed_on_drop() {
        let ns = Namespace::new("guard").expect("a namespace");
        let path = ns.path();
        assert!(path.exists());
        drop(ns);
        assert!(!path.exists());
    }

    #[privileged::test]
    fn code_inside_a_namespace_sees_only_its_devices() {
        let ns = Namespace::new("inside").expect("a namespace");
        ns.ip("link add v0 type veth peer name v1").expect("a veth pair");
        let links =
            ns.run_in(|| std::fs::read_to_string("/proc/thread-self/net/dev")).expect("the device list");
        assert!(links.contains("v0:") && links.contains("v1:"), "{links}");
        let own = std::fs::read_to_string("/proc/thread-self/net/dev").expect("the device list");
        assert!(!own.contains("v0:"), "{own}");
    }

    #[privileged::test]
    fn a_panic_inside_reaches_the_caller_and_removes_the_namespace() {
        let ns = Namespace::new("panic").expect("a namespace");
        let path = ns.path();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            ns.run_in(|| panic!("expected by this test"));
        }));
        assert!(outcome.is_err());
        assert!(!path.exists());
    }
}
