//! `cargo xtask deb`: makes the Debian package and tests it.
//!
//! It checks the contents of the package. Then it installs, uses and purges the package on a throw-away copy of this
//! system: an overlay over `/` in a mount namespace, which leaves the system itself unchanged.

use crate::image::binary::{TARGET, Tree};
use anyhow::{Context as _, Result, bail, ensure};
use shell::tools;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs that the verb runs, and their Debian packages.
const TOOLS: &[(&str, &str)] =
    &[("dpkg-deb", "dpkg"), ("strip", "binutils"), ("systemd-analyze", "systemd"), ("unshare", "util-linux")];

/// The files of the package, with their modes.
const FILES: [(&str, &str); 16] = [
    ("./etc/libvirt/hooks/qemu.d/xdp-imds", "-rwxr-xr-x"),
    ("./etc/xdp-imds/config.yaml", "-rw-r--r--"),
    ("./etc/xdp-imds/libvirt/README", "-rw-r--r--"),
    ("./etc/xdp-imds/records.d/README", "-rw-r--r--"),
    ("./usr/bin/xdp-imds", "-rwxr-xr-x"),
    ("./usr/lib/systemd/system/xdp-imds.service", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/NEWS.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/README.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/changelog.Debian.gz", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/copyright", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/examples/domain.xml", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/reference/configuration-fields.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/reference/configuration.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/reference/record-fields.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/reference/record.md", "-rw-r--r--"),
    ("./usr/share/lintian/overrides/xdp-imds", "-rw-r--r--"),
];

/// The largest size of the package, in octets. A larger package has debugging symbols in it.
const SIZE: u64 = 16 << 20;

/// Mounts an overlay in the directory `$1`, installs the package `$2` in it, uses it as an administrator would with the
/// record `$3`, and purges it.
const INSIDE: &str = r#"
    mount -t tmpfs tmpfs "$1"
    mkdir "$1/upper" "$1/work" "$1/system"
    mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/system"
    cp --preserve=mode "$2" "$3" "$1/system/tmp/"
    for place in proc dev; do mount --rbind "/$place" "$1/system/$place"; done
    mount -t tmpfs tmpfs "$1/system/run"
    exec chroot "$1/system" sh -ec '
        export DEBIAN_FRONTEND=noninteractive
        dpkg --force-confold -i "/tmp/$1"
        test "$(stat -c %a /etc/xdp-imds)" = 700
        unit=/usr/lib/systemd/system/xdp-imds.service
        systemd-analyze verify $unit
        # In tenths: the exposure that systemd computes must not grow.
        systemd-analyze security --offline=true --no-pager --threshold=40 $unit > /tmp/exposure || {
            cat /tmp/exposure
            exit 1
        }
        xdp-imds --version
        cp --preserve=mode "/tmp/$2" /etc/xdp-imds/records.d/
        xdp-imds check --config /etc/xdp-imds/config.yaml /etc/xdp-imds/records.d
        hook=/etc/libvirt/hooks/qemu.d/xdp-imds
        example=/usr/share/doc/xdp-imds/examples/domain.xml
        output=$($hook web-1 start begin - < $example)
        test -z "$output"
        test "$(stat -c %a /run/xdp-imds/hook.d/*.json)" = 600
        xdp-imds check /run/xdp-imds/hook.d
        $hook web-1 release end - < $example
        test -z "$(ls /run/xdp-imds/hook.d)"
        rm /etc/xdp-imds/records.d/"$2"
        dpkg -r xdp-imds
        test ! -e /usr/bin/xdp-imds
        # The configuration and the hook remain. The hook must not keep a domain from starting.
        $hook web-1 start begin - < /dev/null
        dpkg -P xdp-imds
        for place in /etc/xdp-imds /etc/libvirt/hooks/qemu.d/xdp-imds /run/xdp-imds /var/lib/xdp-imds; do
            test ! -e $place || { echo "left behind: $place"; exit 1; }
        done
    ' sh "$(basename "$2")" "$(basename "$3")"
"#;

/// Which binary to package, and where.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Package the binary of an earlier build
    #[arg(long)]
    no_build: bool,
    /// Package the static binary, which the image also has: it runs with any C library
    #[arg(long = "static")]
    is_static: bool,
    /// Cargo's build profile; `quick` builds faster, for tests
    #[arg(long, value_name = "NAME", default_value = "release")]
    profile: String,
    /// The directory of the package [default: target/debian]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let installed = shell::which("cargo-deb").is_some();
    ensure!(installed, "missing: cargo-deb; run `cargo install --locked cargo-deb@3.8.0`");
    tools::ensure(TOOLS)?;
    match (args.no_build, args.is_static) {
        (true, _) => {}
        (false, true) => Tree::here()?.build(&args.profile).map(drop)?,
        (false, false) => {
            let words = ["build", "--locked", "--package", "metadata-user", "--bin", "xdp-imds", "--profile"];
            shell::run(shell::cargo(words).arg(&args.profile))?;
        }
    }
    let package = build(args)?;
    contents(&package)?;
    if shell::which("lintian").is_some() {
        shell::run(
            Command::new("lintian").args(["--fail-on", "error,warning", "--allow-root"]).arg(&package),
        )?;
    } else {
        println!("deb: lintian is not installed; its check is skipped");
    }
    if shell::is_root() {
        on_an_overlay(&package)?;
    } else {
        println!("deb: installing the package on a copy of this system needs root; this is skipped");
    }
    println!("deb: {} is ok, {} KiB", package.display(), fs::metadata(&package)?.len() >> 10);
    Ok(())
}

/// Makes the package from the built binary.
fn build(args: &Args) -> Result<PathBuf> {
    let output = args.output.clone().unwrap_or_else(|| shell::target().join("debian"));
    fs::create_dir_all(&output).with_context(|| format!("cannot make {}", output.display()))?;
    let mut command =
        shell::cargo(["deb", "--no-build", "--strip", "--no-dbgsym", "--package", "metadata-user"]);
    command.args(["--profile", &args.profile]);
    if args.is_static {
        command.args(["--target", TARGET]).env("CARGO_TARGET_DIR", Tree::here()?.target());
    }
    let output = printed(command.arg("--output").arg(output.join("")))?;
    let package =
        output.lines().last().map(PathBuf::from).context("cargo deb did not print the package's path")?;
    ensure!(package.is_file(), "cargo deb did not make {}", package.display());
    Ok(package)
}

/// Checks files, modes, owners, configuration files and version.
fn contents(package: &Path) -> Result<()> {
    let listed = printed(Command::new("dpkg-deb").arg("--contents").arg(package))?;
    let found: BTreeMap<_, _> = listed.lines().filter_map(entry).collect();
    for (path, mode) in FILES {
        let expected = (mode, "0/0");
        let found = found.get(path).copied();
        ensure!(found == Some(expected), "{path}: expected {expected:?}, found {found:?}");
    }
    let known = |path: &&str| path.ends_with('/') || FILES.iter().any(|(file, _)| file == path);
    if let Some(other) = found.keys().find(|path| !known(path)) {
        bail!("{other} is in the package but not in the list of expected files");
    }
    let size = fs::metadata(package)?.len();
    ensure!(size <= SIZE, "expected at most {SIZE} octets, found {size}: is the binary stripped?");
    let conffiles = printed(Command::new("dpkg-deb").args(["--info"]).arg(package).arg("conffiles"))?;
    let kept = FILES.iter().filter_map(|(path, _)| path.strip_prefix('.'));
    let kept: Vec<_> = kept.filter(|path| path.starts_with("/etc/")).collect();
    let mut found: Vec<_> = conffiles.lines().collect();
    found.sort_unstable();
    ensure!(found == kept, "expected the configuration files {kept:?}, found {found:?}");
    let version = printed(Command::new("dpkg-deb").args(["--field"]).arg(package).arg("Version"))?;
    let changes = fs::read_to_string(shell::top().join("deploy/deb/changelog"))?;
    let newest = changes.split(['(', ')']).nth(1).unwrap_or_default();
    ensure!(
        version.trim() == newest,
        "the package has version {}, but the newest entry of the changelog is {newest}",
        version.trim()
    );
    Ok(())
}

/// Returns path, mode and owner from a line of `dpkg-deb --contents`.
fn entry(line: &str) -> Option<(&str, (&str, &str))> {
    let words: Vec<_> = line.split_whitespace().collect();
    Some((words.get(5)?, (words[0], words[1])))
}

/// Installs, uses and purges the package without leaving a trace on this system.
fn on_an_overlay(package: &Path) -> Result<()> {
    let room = tempfile::tempdir()?;
    let record = room.path().join("web.json");
    fs::write(&record, testbed::record::Identity::of(0).record(1))?;
    fs::set_permissions(&record, fs::Permissions::from_mode(0o640))?;
    let place = room.path().join("overlay");
    fs::create_dir(&place)?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--net", "sh", "-ec", INSIDE, "sh"]);
    shell::run(command.arg(&place).arg(package.canonicalize()?).arg(&record))
}

/// Runs a program and returns its standard output. An exit status other than zero is an error.
fn printed(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_owned();
    let output = command.output().with_context(|| format!("cannot run {}", program.display()))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}: {}", program.display(), output.status, errors.trim());
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::entry;

    #[test]
    fn a_line_of_the_package_is_path_mode_and_owner() {
        let line = "-rwxr-xr-x 0/0        31488728 2026-11-21 00:00 ./usr/bin/xdp-imds";
        assert_eq!(entry(line), Some(("./usr/bin/xdp-imds", ("-rwxr-xr-x", "0/0"))));
        assert_eq!(entry(""), None);
    }
}
