//! `cargo xtask deb`: makes the Debian package and tests it.
//!
//! It checks the contents of the package. Then it installs, uses and purges the package on a disposable copy of this
//! system: an overlay over `/` in a mount namespace, which leaves the system itself unchanged.

use anyhow::{Context as _, Result, bail, ensure};
use shell::architecture::Architecture;
use shell::tools;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image;
use crate::image::layout::About;
use crate::image::{Tree, documents};

/// The programs that the verb runs, and their Debian packages.
const TOOLS: &[(&str, &str)] =
    &[("dpkg-deb", "dpkg"), ("strip", "binutils"), ("systemd-analyze", "systemd"), ("unshare", "util-linux")];

/// The files of the package, with their modes.
const FILES: [(&str, &str); 29] = [
    ("./etc/libvirt/hooks/qemu.d/xdp-imds", "-rwxr-xr-x"),
    ("./etc/xdp-imds/config.yaml", "-rw-r--r--"),
    ("./etc/xdp-imds/libvirt/README", "-rw-r--r--"),
    ("./etc/xdp-imds/records.d/README", "-rw-r--r--"),
    ("./usr/bin/xdp-imds", "-rwxr-xr-x"),
    ("./usr/lib/NetworkManager/conf.d/90-xdp-imds.conf", "-rw-r--r--"),
    ("./usr/lib/systemd/network/10-xdp-imds.network", "-rw-r--r--"),
    ("./usr/lib/systemd/system/xdp-imds.service", "-rw-r--r--"),
    ("./usr/share/bash-completion/completions/xdp-imds", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/NEWS.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/README.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/SECURITY.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/changelog.Debian.gz", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/copyright", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/examples/domain.xml", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/libvirt.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/operate/privileges.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/reference/configuration-fields.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/reference/configuration.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/reference/record-fields.md", "-rw-r--r--"),
    ("./usr/share/doc/xdp-imds/reference/record.md", "-rw-r--r--"),
    ("./usr/share/fish/vendor_completions.d/xdp-imds.fish", "-rw-r--r--"),
    ("./usr/share/lintian/overrides/xdp-imds", "-rw-r--r--"),
    ("./usr/share/man/man1/xdp-imds-serve.1.gz", "-rw-r--r--"),
    ("./usr/share/man/man1/xdp-imds.1.gz", "-rw-r--r--"),
    ("./usr/share/xdp-imds/alerts.yaml", "-rw-r--r--"),
    ("./usr/share/xdp-imds/dashboard.json", "-rw-r--r--"),
    ("./usr/share/xdp-imds/proxmox-hookscript", "-rwxr-xr-x"),
    ("./usr/share/zsh/vendor-completions/_xdp-imds", "-rw-r--r--"),
];

/// How the paths of manual pages and of pages of the book begin. There is one for each verb, and for each page.
const PAGES: [&str; 3] = [
    "./usr/share/man/man1/xdp-imds-",
    "./usr/share/doc/xdp-imds/operate/",
    "./usr/share/doc/xdp-imds/reference/",
];

/// The largest size of the package, in bytes. A larger package has debugging symbols in it.
const SIZE: u64 = 16 << 20;

/// Installs the package `$1` with the command `$INSTALL`, uses it as an administrator would with the record `$2`, and
/// purges it.
pub(crate) const USE: &str = r#"
    $INSTALL "/tmp/$1"
    test "$(stat -c %a /etc/xdp-imds)" = 700
    unit=/usr/lib/systemd/system/xdp-imds.service
    test -e /etc/systemd/system/multi-user.target.wants/xdp-imds.service
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
    let about = About::of(shell::top())?;
    let output = args.output.clone().unwrap_or_else(|| shell::target().join("debian"));
    let package = if args.is_static {
        let (tree, here) = (Tree::here()?, image::native()?);
        if !args.no_build {
            tree.build(here, &args.profile)?;
        }
        of_static(&tree, here, &args.profile, &about, &output)?
    } else {
        if !args.no_build {
            let words = ["build", "--locked", "--package", "metadata-user", "--bin", "xdp-imds", "--profile"];
            shell::run(shell::cargo(words).arg(&args.profile))?;
        }
        of_dynamic(&args.profile, &about, &output)?
    };
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

/// Makes the package from a binary that is linked with this system's C library.
fn of_dynamic(profile: &str, about: &About, output: &Path) -> Result<PathBuf> {
    let products = shell::target().join(if profile == "dev" { "debug" } else { profile });
    documents::write(&products.join("xdp-imds"), &products)?;
    let mut command = shell::cargo(["deb", "--strip"]);
    made(&mut command, profile, about, output)
}

/// Makes the package from the static binary for an architecture. That binary and this machine's must be built.
pub(crate) fn of_static(
    tree: &Tree,
    architecture: Architecture,
    profile: &str,
    about: &About,
    output: &Path,
) -> Result<PathBuf> {
    tree.write_pages(architecture, profile)?;
    let mut command = shell::cargo(["deb", "--no-strip"]);
    command.args(["--target", architecture.triple()]).current_dir(tree.top());
    command.env("CARGO_TARGET_DIR", tree.target());
    made(&mut command, profile, about, output)
}

/// Completes the command, runs it and returns the path of the package.
fn made(command: &mut Command, profile: &str, about: &About, output: &Path) -> Result<PathBuf> {
    fs::create_dir_all(output).with_context(|| format!("cannot make {}", output.display()))?;
    command.args([
        "--locked",
        "--no-build",
        "--no-dbgsym",
        "--package",
        "metadata-user",
        "--profile",
        profile,
    ]);
    if profile != "release" {
        // Nobody downloads it, and the better compression takes a minute.
        command.arg("--fast");
    }
    // Every file of the package gets this time.
    command.env("SOURCE_DATE_EPOCH", about.epoch().to_string());
    let printed = printed(command.arg("--output").arg(output.join("")))?;
    let package =
        printed.lines().last().map(PathBuf::from).context("cargo deb did not print the package's path")?;
    ensure!(package.is_file(), "cargo deb did not make {}", package.display());
    Ok(package)
}

/// Checks files, modes, owners, configuration files and version.
pub(crate) fn contents(package: &Path) -> Result<()> {
    let listed = printed(Command::new("dpkg-deb").arg("--contents").arg(package))?;
    let found: BTreeMap<_, _> = listed.lines().filter_map(entry).collect();
    for (path, mode) in FILES {
        let expected = (mode, "0/0");
        let found = found.get(path).copied();
        ensure!(found == Some(expected), "{path}: expected {expected:?}, found {found:?}");
    }
    let known = |path: &&str| {
        path.ends_with('/')
            || PAGES.iter().any(|start| path.starts_with(start))
            || FILES.iter().any(|(file, _)| file == path)
    };
    if let Some(other) = found.keys().find(|path| !known(path)) {
        bail!("{other} is in the package but not in the list of expected files");
    }
    let size = fs::metadata(package)?.len();
    ensure!(size <= SIZE, "expected at most {SIZE} bytes, found {size}: is the binary stripped?");
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
    let inside = format!("INSTALL='dpkg --force-confold -i'\n{USE}");
    run_on_overlay("/".as_ref(), &[package, &record(room.path())?], &Scripts { outside: "", inside: &inside })
}

/// Writes the record of a VM into a directory.
pub(crate) fn record(room: &Path) -> Result<PathBuf> {
    let record = room.join("web.json");
    fs::write(&record, testbed::record::Identity::of(0).record(1))?;
    fs::set_permissions(&record, fs::Permissions::from_mode(0o640))?;
    Ok(record)
}

/// Runs a program and returns its standard output. An exit status other than zero is an error.
pub(crate) fn printed(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_owned();
    let output = command.output().with_context(|| format!("cannot run {}", program.display()))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}: {}", program.display(), output.status, errors.trim());
    Ok(String::from_utf8(output.stdout)?)
}

// Runs scripts as root in a disposable copy of a system: an overlay over its root directory, in mount and network
// namespaces of their own. The system itself stays unchanged.

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
pub(crate) fn run_on_overlay(root: &Path, files: &[&Path], scripts: &Scripts<'_>) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::Command;

    use super::entry;

    /// Runs a script of a package with the argument `word` in a directory that stands for a system, which has a
    /// configuration if `config` says whether the agent can read it. Returns the calls of programs that do nothing there.
    fn calls(script: &str, word: &str, config: Option<bool>) -> Vec<String> {
        let room = tempfile::tempdir().expect("a directory");
        let (top, told) = (room.path().display(), room.path().join("told"));
        for directory in ["bin", "etc/xdp-imds", "run/systemd/system"] {
            fs::create_dir_all(room.path().join(directory)).expect("a directory");
        }
        if let Some(is_good) = config {
            let text = if is_good { "pins: /sys/fs/bpf/another\n" } else { "unknown\n" };
            fs::write(room.path().join("etc/xdp-imds/config.yaml"), text).expect("a configuration");
        }
        for program in ["systemctl", "xdp-imds"] {
            let text = format!(
                "#!/bin/sh\necho \"{program} $*\" >> '{}'\n[ \"$2\" != --config ] || grep -q pins \"$3\"\n",
                told.display()
            );
            let path = room.path().join("bin").join(program);
            fs::write(&path, text).expect("a program");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
        }
        let text = script
            .replace("=/etc/", &format!("={top}/etc/"))
            .replace("/run/systemd", &format!("{top}/run/systemd"));
        let status = Command::new("/bin/sh")
            .args(["-c", &text, "sh", word])
            .env("PATH", format!("{top}/bin:/usr/bin:/bin"))
            .status()
            .expect("a shell");
        assert!(status.success(), "{word} {config:?}: {status}");
        let told = fs::read_to_string(told).unwrap_or_default().replace(&top.to_string(), "");
        told.lines().filter(|line| !line.contains("disable")).map(str::to_owned).collect()
    }

    #[test]
    fn the_removal_of_a_package_opens_the_taps_of_the_configured_pins() {
        let configured = "xdp-imds release --config /etc/xdp-imds/config.yaml";
        let default = "xdp-imds release --pins /sys/fs/bpf/xdp-imds";
        for (script, removal, upgrade) in [
            (include_str!("../../../deploy/deb/scripts/prerm"), "remove", "upgrade"),
            (include_str!("../../../deploy/rpm/scripts/preun"), "0", "1"),
        ] {
            for (config, expected) in
                [(Some(true), &[configured][..]), (Some(false), &[configured, default]), (None, &[default])]
            {
                assert_eq!(calls(script, removal, config), expected, "{removal} {config:?}");
                assert_eq!(calls(script, upgrade, config), Vec::<String>::new(), "{upgrade} {config:?}");
            }
        }
    }

    #[test]
    fn an_upgrade_by_rpm_starts_the_new_agent_by_the_new_unit() {
        let postun = include_str!("../../../deploy/rpm/scripts/postun");
        let expected = ["systemctl daemon-reload", "systemctl try-restart xdp-imds.service"];
        assert_eq!(calls(postun, "1", Some(true)), expected);
        assert_eq!(calls(postun, "0", Some(true)), Vec::<String>::new(), "a removal");
    }

    #[test]
    fn a_line_of_the_package_is_path_mode_and_owner() {
        let line = "-rwxr-xr-x 0/0        31488728 2026-11-21 00:00 ./usr/bin/xdp-imds";
        assert_eq!(entry(line), Some(("./usr/bin/xdp-imds", ("-rwxr-xr-x", "0/0"))));
        assert_eq!(entry(""), None);
    }
}
