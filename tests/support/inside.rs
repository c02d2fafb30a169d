//! Programs inside a guest: the file system that they see (the guest's network namespace alone isolates only the network),
//! roots of other releases of Debian, Afterburn, and client libraries for Python.

use anyhow::{Context as _, Result, bail, ensure};
use shell::afterburn::{install, program};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use testbed::packages::{self, PYTHON};

use crate::netns::{Namespace, run};
use crate::privileged;

/// A guest's `/etc/hosts`: only GCE's name has an address.
const HOSTS: &str = "127.0.0.1 localhost\n169.254.169.254 metadata.google.internal metadata\n";
/// A guest's `/etc/nsswitch.conf`. It has no DNS, because waiting for an absent server takes time.
const NAME_SOURCES: &str = "hosts: files\n";
/// Mounts the guest's devices, empty state directories and the files `$1` and `$2`. Then runs the remaining arguments.
/// The mount namespace ends with the program.
const SEEN_FROM_INSIDE: &str = "
    mount -t sysfs sysfs /sys
    for state in /run /var/lib/hyperv; do
        if [ -d $state ]; then mount -t tmpfs tmpfs $state; fi
    done
    mount --bind \"$1\" /etc/hosts
    mount --bind \"$2\" /etc/nsswitch.conf
    shift 2
    exec \"$@\"
";

/// A command to which the caller adds a program and its arguments. The program sees a guest's file system and runs for
/// at most `seconds`. `state` is its private directory and home.
///
/// # Errors
/// When nothing can be written to `state`.
pub fn command(state: &Path, seconds: u32) -> Result<Command> {
    let (hosts, sources) = (state.join("hosts"), state.join("nsswitch.conf"));
    fs::write(&hosts, HOSTS)
        .and_then(|()| fs::write(&sources, NAME_SOURCES))
        .with_context(|| format!("cannot write to {}", state.display()))?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-ec", SEEN_FROM_INSIDE, "sh"]);
    command.args([&hosts, &sources]).args(["timeout", &seconds.to_string()]);
    // The command does not inherit proxy, credentials or locale.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("HOME", state).env("LC_ALL", "C.UTF-8");
    Ok(command)
}

// Afterburn, the metadata agent of Fedora CoreOS and Flatcar. It is built from the package registry into the target
// directory, because Debian does not package it.

/// Returns the program. Skips the test like [`privileged::or_skip`] if privileges or the program are missing. Tests do
/// not build it, because they run as root and the build runs code of many packages.
///
/// # Panics
/// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
#[must_use]
#[track_caller]
pub fn afterburn_or_skip() -> Option<PathBuf> {
    let ready = match privileged::missing() {
        Some(reason) => Err(reason.to_owned()),
        None => built().map_err(|error| format!("{error:#}")),
    };
    privileged::or_skip_for(ready.as_ref().err().map(String::as_str)).then(|| ready.ok())?
}

fn built() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the running program's own file")?;
    // `own` is target/<profile>/deps/<test>. All profiles share one program.
    let target = own.ancestors().find(|path| path.ends_with("target")).context("not inside target/")?;
    let program = program(target);
    let words: Vec<_> = install(Path::new("target")).iter().map(|word| word.display().to_string()).collect();
    ensure!(
        program.is_file(),
        "afterburn is not built; `cargo xtask test` builds it, and so does `cargo {}`",
        words.join(" ")
    );
    Ok(program)
}

// A separate machine for a guest agent: a root directory, and namespaces for everything except the network.
//
// A guest agent creates accounts, sets names and clocks and writes to `/etc` and `/run`. Here it runs in a copy of an
// unpacked distribution, with its own mounts, processes, host name and devices. It has no capability to change the
// clock or the hardware of the machine that runs the test.

/// Capabilities that no guest agent gets.
const FORBIDDEN: &str = "--bounding-set=-sys_time,-sys_boot,-sys_module,-sys_rawio,-syslog,-audit_control";
/// The agent's `/etc/nsswitch.conf`. It disables DNS, so that the agent does not wait for a missing server.
const ROOT_NAME_SOURCES: &str = "passwd: files\ngroup: files\nshadow: files\nhosts: files\n";
/// Mounts the file systems of a running system in the directory `$1`, and runs the remaining arguments in it for at
/// most `$2` seconds. File systems shared with the machine (`/sys`, `/proc/sys`) are read-only.
const ENTER: &str = "
    root=$1; seconds=$2; shift 2
    mount --bind \"$root\" \"$root\"
    mount -t proc proc \"$root/proc\"
    mount --bind \"$root/proc/sys\" \"$root/proc/sys\"
    mount -o remount,bind,ro \"$root/proc/sys\"
    trigger=\"$root/proc/sysrq-trigger\"
    if [ -e \"$trigger\" ]; then mount --bind /dev/null \"$trigger\"; fi
    mount -t sysfs -o ro sysfs \"$root/sys\"
    mount -t tmpfs tmpfs \"$root/dev\"
    for device in null zero full random urandom; do
        : > \"$root/dev/$device\"
        mount --bind /dev/$device \"$root/dev/$device\"
    done
    hostname unconfigured
    exec timeout --signal=KILL $seconds chroot \"$root\" \"$@\"
";

/// A root directory, which is removed when its guard is dropped.
#[derive(Debug)]
pub struct Root {
    directory: tempfile::TempDir,
}

impl Root {
    /// Copies an unpacked tree to a directory beside it.
    ///
    /// # Errors
    /// When the copy fails.
    pub fn copy_of(tree: &Path) -> Result<Self> {
        let beside = tree.parent().context("an unpacked tree is in a directory")?;
        let directory = tempfile::Builder::new().prefix("root-").tempdir_in(beside)?;
        run(Command::new("cp")
            .args(["--archive", "--reflink=auto"])
            .arg(tree.join("."))
            .arg(directory.path()))?;
        let root = Self { directory };
        for made in ["proc", "sys", "dev", "etc", "run", "tmp", "root", "var/lib"] {
            fs::create_dir_all(root.path(made))?;
        }
        root.write("etc/hosts", HOSTS)?;
        root.write("etc/nsswitch.conf", ROOT_NAME_SOURCES)?;
        Ok(root)
    }

    /// The path of a file in the root, as seen from this machine.
    #[must_use]
    pub fn path(&self, inside: &str) -> PathBuf {
        self.directory.path().join(inside.trim_start_matches('/'))
    }

    /// The text of a file in the root.
    ///
    /// # Errors
    /// When it does not exist or is not text.
    pub fn read(&self, inside: &str) -> Result<String> {
        fs::read_to_string(self.path(inside)).with_context(|| format!("the agent has no /{inside}"))
    }

    /// Writes a file in the root, and creates its parent directories.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, inside: &str, text: &str) -> Result<()> {
        let path = self.path(inside);
        fs::create_dir_all(path.parent().context("a file is in a directory")?)?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// A command that runs a program with arguments in the root. The program and all its children are killed after
    /// `seconds`, or when the command ends.
    #[must_use]
    pub fn command(&self, words: &[&str], seconds: u32) -> Command {
        let mut command = Command::new("setpriv");
        command.args([FORBIDDEN, "unshare"]);
        command.args([
            "--mount",
            "--propagation",
            "private",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
        ]);
        command.args(["sh", "-ec", ENTER, "sh"]).arg(self.directory.path());
        command.arg(seconds.to_string()).args(words);
        // The environment has no proxy, credentials or locale of the machine.
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("HOME", "/root").env("LC_ALL", "C.UTF-8").stdin(Stdio::null());
        command
    }

    /// Runs a program with arguments inside a guest until it ends. Returns its standard output and standard error.
    ///
    /// # Errors
    /// When it fails or takes longer than `seconds`. The error contains its output.
    pub fn run(&self, guest: &Namespace, words: &[&str], seconds: u32) -> Result<String> {
        let output = guest.output(&mut self.command(words, seconds))?;
        let said = text_of(&output);
        ensure!(output.status.success(), "{} ended with {}:\n{said}", words.join(" "), output.status);
        Ok(said)
    }

    /// Starts a guest agent. It runs until its guard is dropped or `seconds` have passed.
    ///
    /// # Errors
    /// When it cannot start.
    pub fn start(&self, guest: &Namespace, words: &[&str], seconds: u32) -> Result<Daemon<'_>> {
        let log = fs::File::create(self.path(LOG))?;
        let mut command = self.command(words, seconds);
        command.stdout(log.try_clone()?).stderr(log);
        Ok(Daemon { root: self, child: guest.spawn(&mut command)? })
    }
}

/// The file of a daemon's output.
const LOG: &str = "daemon.log";

/// Standard output and standard error of a program.
fn text_of(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// A running guest agent. Dropping it kills the agent and all its children.
#[derive(Debug)]
pub struct Daemon<'a> {
    root: &'a Root,
    child: Child,
}

impl Daemon<'_> {
    /// Its standard output and standard error so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.root.read(LOG).unwrap_or_else(|error| error.to_string())
    }

    /// Checks that it still runs.
    ///
    /// # Errors
    /// When it has ended. The error contains its output.
    pub fn runs(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the agent ended with {status}:\n{}", self.log()),
        }
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        // The end of `unshare` kills the first process of the namespace. The kernel then kills all others.
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = ended {
            eprintln!("cannot stop agent {}: {error}", self.child.id());
        }
        if std::thread::panicking() {
            eprintln!("--- output of the agent ---\n{}\n---", self.log());
        }
    }
}

// Programs and libraries from the Python package registry. They are installed in the target directory. Client libraries
// run inside a guest.

/// Limit for one script.
pub const SCRIPT_SECONDS: u32 = 60;
static CLIENTS: LibraryList =
    LibraryList::new("client-libraries", include_str!("../clients/requirements.txt"));

/// Releases and the hashes of their files. They are installed once for each change of the list.
#[derive(Debug)]
pub struct LibraryList {
    name: &'static str,
    requirements: &'static str,
    ready: OnceLock<std::result::Result<Libraries, String>>,
}

impl LibraryList {
    /// A list with the name of its directory, in pip's format of requirements.
    #[must_use]
    pub const fn new(name: &'static str, requirements: &'static str) -> Self {
        Self { name, requirements, ready: OnceLock::new() }
    }

    /// Returns the installed libraries. Skips the test like [`privileged::or_skip`] if privileges, pip or the registry
    /// are missing.
    ///
    /// # Panics
    /// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
    #[must_use]
    #[track_caller]
    pub fn or_skip(&self) -> Option<&Libraries> {
        let ready = self.ready.get_or_init(|| match privileged::missing() {
            Some(reason) => Err(reason.to_owned()),
            None => self.install().map_err(|error| format!("it cannot get {}: {error:#}", self.name)),
        });
        let missing = ready.as_ref().err().map(String::as_str);
        if !privileged::or_skip_for(missing) {
            return None;
        }
        ready.as_ref().ok()
    }

    fn install(&self) -> Result<Libraries> {
        let own = std::env::current_exe().context("cannot find the running program's own file")?;
        // `own` is target/<profile>/deps/<test>. All profiles share the libraries.
        let target = own.ancestors().find(|path| path.ends_with("target")).context("not inside target/")?;
        let root = packages::install_wheels(self.requirements, target, self.name)?;
        Ok(Libraries { root })
    }
}

/// Installed libraries.
#[derive(Debug)]
pub struct Libraries {
    root: PathBuf,
}

impl Libraries {
    /// The client libraries, or a skipped test as in [`LibraryList::or_skip`].
    ///
    /// # Panics
    /// Like [`LibraryList::or_skip`].
    #[must_use]
    #[track_caller]
    pub fn or_skip() -> Option<&'static Self> {
        CLIENTS.or_skip()
    }

    /// An interpreter that finds these libraries, and none that are installed on this machine.
    #[must_use]
    pub fn python(&self) -> Command {
        let mut command = Command::new(PYTHON);
        command.arg("-S").env("PYTHONPATH", &self.root);
        command
    }

    /// Runs a script inside a guest. Returns the JSON document that it prints.
    ///
    /// # Errors
    /// When the script raises an exception, does not end within [`SCRIPT_SECONDS`], or prints anything else.
    pub fn run(&self, guest: &Namespace, script: &str) -> Result<serde_json::Value> {
        let state = tempfile::tempdir()?;
        let mut command = command(state.path(), SCRIPT_SECONDS)?;
        // -S ignores the packages installed on this machine.
        command.args([PYTHON, "-S", "-B", "-c", script]).env("PYTHONPATH", &self.root);
        let output = guest.output(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            bail!("the client ended with {}: {}", output.status, said.trim());
        }
        serde_json::from_slice(&output.stdout).with_context(|| {
            format!("the client printed {} and {}", String::from_utf8_lossy(&output.stdout), said.trim())
        })
    }
}
