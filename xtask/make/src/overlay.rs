//! Runs scripts as root in a throw-away copy of a system: an overlay over its root directory, in mount and network
//! namespaces of their own. The system itself stays unchanged.

use anyhow::{Context as _, Result, ensure};
use std::path::Path;
use std::process::Command;

/// Mounts an overlay over the root directory `$2` in the directory `$1`, copies the files `$3…` into its `/tmp`, runs
/// `$OUTSIDE` with `$system` set to the root of the copy, and then `$INSIDE` within it with the files' names.
const MOUNT: &str = r#"
    place=$1 lower=$2
    shift 2
    mount -t tmpfs tmpfs "$place"
    mkdir "$place/upper" "$place/work" "$place/system"
    mount -t overlay overlay -o "lowerdir=$lower,upperdir=$place/upper,workdir=$place/work" "$place/system"
    system=$place/system
    for file; do
        cp --preserve=mode "$file" "$system/tmp/"
        set -- "$@" "${file##*/}"
        shift
    done
    for place in proc dev; do mount --rbind "/$place" "$system/$place"; done
    mount -t tmpfs tmpfs "$system/run"
    sh -ec "$OUTSIDE" sh "$system" "$@"
    exec chroot "$system" sh -ec "$INSIDE" sh "$@"
"#;

/// The scripts to run in a copy of a system. Each gets the names of the copied files as arguments; `outside` gets the
/// copy's root directory before them.
pub(crate) struct Scripts<'a> {
    /// Runs first, with the programs of this machine.
    pub(crate) outside: &'a str,
    /// Runs in the copy, with its programs and the files in `/tmp`.
    pub(crate) inside: &'a str,
}

/// Runs the scripts in a copy of the system below `root`. Needs root.
pub(crate) fn run(root: &Path, files: &[&Path], scripts: &Scripts<'_>) -> Result<()> {
    let room = tempfile::tempdir()?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--net", "sh", "-ec", MOUNT, "sh"]);
    command.arg(room.path()).arg(root);
    let mut shown = vec!["install, use and remove".to_owned()];
    for file in files {
        command.arg(file.canonicalize().with_context(|| format!("there is no {}", file.display()))?);
        shown.extend(file.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    command.env("OUTSIDE", scripts.outside).env("INSIDE", scripts.inside);
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C.UTF-8");
    eprintln!("$ {} in a copy of {}", shown.join(" "), root.display());
    let status = command.status().context("cannot run unshare")?;
    ensure!(
        status.success(),
        "a step in a copy of {} failed, {status}; its messages are above",
        root.display()
    );
    Ok(())
}
