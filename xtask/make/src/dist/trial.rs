//! Installs and uses the packages of a release as their users do, on throw-away copies of their systems.
//!
//! Each system is made once, by mmdebstrap, and kept below the target directory. An overlay over it takes the changes.
//! A Fedora cannot be made on Debian, so Debian's `rpm` installs the RPM package into a Debian system, without
//! judging dependencies; its `dnf` judges them, with a package that stands for those that a Fedora has.

use super::{SUMS, VERSION, repositories};
use crate::deb;
use crate::image::binary::native;
use crate::overlay::{self, Scripts};
use anyhow::{Context as _, Result, ensure};
use shell::tools;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs that the trial runs, and their Debian packages.
const TOOLS: &[(&str, &str)] = &[
    ("mmdebstrap", "mmdebstrap"),
    ("rpm", "rpm"),
    ("sha256sum", "coreutils"),
    ("skopeo", "skopeo"),
    ("unshare", "util-linux"),
];

/// The suites of Debian, which APT's own package lists need not name, and their mirror.
const SUITES: [&str; 2] = ["bookworm", "trixie"];
const MIRROR: &str = "http://deb.debian.org/debian";
/// What a node has beside the essential packages: the package's dependencies, systemd and the reader of manual pages.
const INCLUDED: &str = "procps,systemd,man-db";

/// Installs the package with APT, as a reader of the README would. `$1` is the package, `$2` a record.
const APT: &str = r"
    INSTALL='apt-get install -y -q'
    man -w xdp-imds >/dev/null 2>&1 && { echo 'the manual page is there before the package'; exit 1; }
    apt-get install -y -q /tmp/$1
    man -w xdp-imds xdp-imds-serve
    man xdp-imds-serve | grep -q -- --records
    for file in bash-completion/completions/xdp-imds zsh/vendor-completions/_xdp-imds \
        fish/vendor_completions.d/xdp-imds.fish
    do
        test -s /usr/share/$file
    done
    apt-get purge -y -q xdp-imds
";

/// Installs the RPM package `$2` into the system `$1`.
const RPM_OUTSIDE: &str = r#"
    rpm --root "$1" --initdb
    rpm --root "$1" --install --nodeps --ignorearch "$1/tmp/$2"
    rpm --root "$1" --verify --nodeps xdp-imds
    test "$(stat -c %a "$1/etc/xdp-imds")" = 700
    chroot "$1" xdp-imds --version
    chroot "$1" xdp-imds check --config /etc/xdp-imds/config.yaml /etc/xdp-imds/records.d
    chroot "$1" systemd-analyze verify --man=no /usr/lib/systemd/system/xdp-imds.service
    chroot "$1" /etc/libvirt/hooks/qemu.d/xdp-imds web-1 start begin - < "$1/usr/share/doc/xdp-imds/examples/domain.xml"
    chroot "$1" xdp-imds check /run/xdp-imds/hook.d
    echo changed >> "$1/etc/xdp-imds/config.yaml"
    rpm --root "$1" --upgrade --force --nodeps --ignorearch "$1/tmp/$2"
    grep -qx changed "$1/etc/xdp-imds/config.yaml"
    rpm --root "$1" --erase --nodeps xdp-imds
    test ! -e "$1/usr/bin/xdp-imds"
    test -e "$1/etc/xdp-imds/config.yaml.rpmsave"
"#;

/// Tries every package for this machine's architecture in the directory of a release.
pub(super) fn run(out: &Path) -> Result<()> {
    ensure!(shell::is_root(), "installing packages on copies of a system needs root; run the verb as root");
    tools::ensure(TOOLS)?;
    shell::run(Command::new("sha256sum").args(["--check", "--strict", "--quiet", SUMS]).current_dir(out))?;
    let here = native()?;
    let room = tempfile::tempdir()?;
    let record = deb::record(room.path())?;
    let package = out.join(format!("xdp-imds_{VERSION}-1_{}.deb", here.short()));
    let mut systems = Vec::new();
    for suite in SUITES {
        let system = system(suite)?;
        systems.push(system.clone());
        let inside = format!("{APT}\n{}", deb::USE);
        overlay::run(&system, &[&package, &record], &Scripts { outside: "", inside: &inside })
            .with_context(|| format!("{} does not install on {suite}", package.display()))?;
        println!("dist: {suite}: apt-get installed, used and purged {}", package.display());
    }
    let package = out.join(format!("xdp-imds-{VERSION}-1.{}.rpm", here.name()));
    overlay::run(&system(SUITES[0])?, &[&package], &Scripts { outside: RPM_OUTSIDE, inside: "" })
        .with_context(|| format!("{} does not install", package.display()))?;
    println!(
        "dist: rpm installed, used, upgraded and erased {} (on Debian, without dependencies)",
        package.display()
    );
    repositories::run(out, &systems, here)?;
    image(out, room.path())
}

/// Makes a minimal system of a suite, or returns the one made before.
fn system(suite: &str) -> Result<PathBuf> {
    let root = shell::target().join("systems").join(suite);
    let done = root.join("etc/debian_version");
    if done.is_file() {
        return Ok(root);
    }
    let parent = root.parent().context("the system's path has no directory")?;
    fs::create_dir_all(parent)?;
    let unfinished = parent.join(format!("{suite}.new"));
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)?;
    }
    eprintln!("dist: making a system of Debian {suite}, about a minute");
    let mut command = Command::new("mmdebstrap");
    command.args(["--mode=root", "--variant=apt", "--quiet"]).arg(format!("--include={INCLUDED}"));
    shell::run(command.arg(suite).arg(&unfinished).arg(format!("deb {MIRROR} {suite} main")))?;
    fs::rename(&unfinished, &root)?;
    Ok(root)
}

/// Reads the image with a client of registries, which copies it with all architectures.
fn image(out: &Path, room: &Path) -> Result<()> {
    let from = format!("oci-archive:{}", out.join(format!("xdp-imds-{VERSION}.oci.tar")).display());
    let to = format!("oci:{}", room.join("image").display());
    let mut copy = Command::new("skopeo");
    copy.args(["--insecure-policy", "copy", "--all", "--quiet", &from, &format!("{to}:latest")]);
    shell::run(&mut copy)?;
    let mut inspect = Command::new("skopeo");
    inspect.args(["inspect", "--raw", &format!("{to}:latest")]);
    let index: serde_json::Value = serde_json::from_str(&deb::printed(&mut inspect)?)?;
    let found: Vec<_> = index["manifests"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|entry| entry["platform"]["architecture"].as_str())
        .collect();
    // A release for one architecture has its image alone, without an index.
    ensure!(
        !found.is_empty() || index["config"].is_object(),
        "expected an index with an image for each architecture, found {index}"
    );
    let found = if found.is_empty() { vec!["one architecture"] } else { found };
    println!("dist: skopeo copied the image for {}", found.join(" and "));
    Ok(())
}
