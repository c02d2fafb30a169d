//! The surroundings of a program that runs inside a guest: a network namespace changes what a program is
//! sent, not what it reads from the file system.

use anyhow::{Context as _, Result};
use std::fs;
use std::path::Path;
use std::process::Command;

/// What a guest's `/etc/hosts` says: GCE's name has an address, and no other name has one.
const HOSTS: &str = "127.0.0.1 localhost\n169.254.169.254 metadata.google.internal metadata\n";
/// A guest's `/etc/nsswitch.conf`: there is no DNS, which answers faster than a server that is not there.
const NAME_SOURCES: &str = "hosts: files\n";
/// Makes the file system fit the network namespace, in a mount namespace that dies with the program: the
/// guest's devices, nobody's state, the two files given. The remaining words are run.
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

/// A command that runs the words it is given yet as a guest would see them, ended after `seconds`. `state`
/// is a directory for this program alone, which is also its home.
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
    // An environment of its own: no proxy, no credentials, no locale of the machine's.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("HOME", state).env("LC_ALL", "C.UTF-8");
    Ok(command)
}
