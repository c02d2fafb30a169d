//! `cargo xtask dist`: makes every file of a release, and proves that they can be made again.
//!
//! For each architecture: an archive with the static binary, a Debian package, an RPM package and a bill of materials.
//! For all together: an OCI image, the Helm chart, and `SHA256SUMS`. The same source and toolchain make the same bytes
//! wherever and whenever they are built. Beside them, repositories of APT and DNF, which are made of the packages.

mod rpm;

use anyhow::{Context as _, Result, bail, ensure};
use shell::architecture::Architecture;
use shell::tools;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::deb;
use crate::deb::Scripts;
use crate::image::layout::{About, Image, LayerEntry};
use crate::image::{self, Tree, bill, layout, native, sha256};
use crate::manifests::CHART;

/// The version of the release.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The list of the other files with their digests, as `sha256sum --check` reads it.
const SUMS: &str = "SHA256SUMS";

/// What to make, and which checks to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory of the files; an older release in it is replaced [default: target/dist]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The architectures, separated by commas
    #[arg(long, value_name = "LIST", value_parser = Architecture::named, value_delimiter = ',', default_value = "x86_64,aarch64")]
    architectures: Vec<Architecture>,
    /// Cargo's build profile; `quick` is for tests and takes a third of the time
    #[arg(long, value_name = "NAME", default_value = "release")]
    profile: String,
    /// Make nothing, and try the files of an earlier run
    #[arg(long, conflicts_with = "check", requires = "trial")]
    no_build: bool,
    /// Make everything again from a copy of the tree in another directory, and fail unless all files are equal
    #[arg(long)]
    check: bool,
    /// Install and use the packages of this machine's architecture on disposable copies of Debian 12 and 13, as files
    /// and from the repository; the RPM package with Debian's `rpm`, and from the repository with its `dnf` (needs root
    /// and a Debian mirror)
    #[arg(long = "try")]
    trial: bool,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| shell::target().join("dist"));
    if !args.no_build {
        build(args, &out)?;
    }
    if args.trial {
        try_packages(&out)?;
    }
    println!("dist: {} is ok", out.display());
    Ok(())
}

/// Makes a release, and with `--check` makes it again elsewhere and compares.
fn build(args: &Args, out: &Path) -> Result<()> {
    // Read once, because a copy has no history and the tree may change during the build.
    let about = About::of(shell::top())?;
    let first = make(&Tree::here()?, args, &about, out)?;
    for (name, digest) in &first {
        println!("{digest}  {name}");
    }
    if args.check {
        let elsewhere = Tree::copy()?;
        let second = make(&elsewhere, args, &about, &elsewhere.target().join("dist"))?;
        same(&first, &second)?;
        println!("dist: a build in {} made the same {} files", elsewhere.top().display(), first.len());
    }
    Ok(())
}

/// The names of the files of a release, each with its SHA-256.
type Digests = BTreeMap<String, String>;

/// Fails if two releases differ; the error names the files.
fn same(first: &Digests, second: &Digests) -> Result<()> {
    let names = first.keys().chain(second.keys());
    let mut different: Vec<_> =
        names.filter(|name| first.get(*name) != second.get(*name)).map(String::as_str).collect();
    different.sort_unstable();
    different.dedup();
    ensure!(different.is_empty(), "two builds of the same source differ in {}", different.join(", "));
    Ok(())
}

/// Builds a tree and writes the files of a release to `out`.
fn make(tree: &Tree, args: &Args, about: &About, out: &Path) -> Result<Digests> {
    let started = Instant::now();
    empty(out)?;
    // Its binary writes the pages of all packages.
    tree.build(native()?, &args.profile)?;
    let mut images = Vec::new();
    for (at, &architecture) in args.architectures.iter().enumerate() {
        eprintln!("dist: {} ({} of {})", architecture.name(), at + 1, args.architectures.len());
        images.push(one(tree, architecture, &args.profile, about, out)?);
    }
    let image = out.join(format!("xdp-imds-{VERSION}.oci.tar"));
    fs::write(&image, packed(&images, about)?)
        .with_context(|| format!("cannot write {}", image.display()))?;
    make_chart(tree.top(), about, out)?;
    let digests = digests(out)?;
    let lines: String = digests.iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect();
    fs::write(out.join(SUMS), lines)?;
    rpm::make_repositories(tree.top(), out, &out.join(rpm::NAME), None)?;
    eprintln!("dist: {} files in {}, {} s", digests.len(), out.display(), started.elapsed().as_secs());
    Ok(digests)
}

/// Makes the files of one architecture, and returns its image.
fn one(tree: &Tree, architecture: Architecture, profile: &str, about: &About, out: &Path) -> Result<Image> {
    let image = image::make(tree, architecture, profile, about)?;
    let package = deb::of_static(tree, architecture, profile, about, out)?;
    deb::contents(&package)?;
    rpm::make_rpm(&package, architecture, about, tree.top(), out)?;
    make_archive(tree, architecture, profile, about, out)?;
    let bill = out.join(format!("xdp-imds-{VERSION}-{}.cdx.json", architecture.name()));
    fs::write(bill, bill::of(tree.top(), architecture)?)?;
    Ok(image)
}

/// Makes an empty directory in place of an older release. A directory with other files stays, and is an error.
fn empty(out: &Path) -> Result<()> {
    let has_files = out.is_dir() && fs::read_dir(out)?.next().is_some();
    if out.join(SUMS).is_file() || (has_files && unfinished(out)?) {
        fs::remove_dir_all(out).with_context(|| format!("cannot replace {}", out.display()))?;
    } else if has_files {
        bail!("{} has files that are not of a release; name another directory with --out", out.display());
    }
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))
}

/// True if a directory has only files of a release that was not completed.
fn unfinished(out: &Path) -> Result<bool> {
    let mut names = fs::read_dir(out)?.map(|entry| Ok(entry?.file_name()));
    names.try_fold(true, |so_far, name: Result<_>| {
        Ok(so_far && name?.to_string_lossy().starts_with("xdp-imds"))
    })
}

/// Returns the digests of the files in a directory.
fn digests(out: &Path) -> Result<Digests> {
    let mut digests = Digests::new();
    for entry in fs::read_dir(out)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            continue;
        }
        let bytes = fs::read(entry.path())?;
        digests.insert(entry.file_name().to_string_lossy().into_owned(), sha256(&bytes));
    }
    Ok(digests)
}

/// Returns the layout of the images as one archive, which skopeo, podman and containerd read.
fn packed(images: &[Image], about: &About) -> Result<Vec<u8>> {
    let room = tempfile::tempdir()?;
    layout::write(images, room.path(), VERSION)?;
    let mut entries = Vec::new();
    for directory in ["", "blobs/sha256"] {
        for file in fs::read_dir(room.path().join(directory))? {
            let path = file?.path();
            if path.is_file() {
                let name = path.strip_prefix(room.path())?.to_string_lossy();
                entries.push(LayerEntry::file(&name, fs::read(&path)?));
            }
        }
    }
    Ok(layout::write_layer(entries, about.epoch())?.tar)
}

// Writes the archive with the static binary, for systems whose package manager reads neither .deb nor .rpm.

/// Files of the source in the archive, with their names in it.
const FILES: [(&str, &str); 7] = [
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("LICENSE-APACHE", "LICENSE-APACHE"),
    ("LICENSE-MIT", "LICENSE-MIT"),
    ("README.md", "README.md"),
    ("deploy/deb/config.yaml", "config.yaml"),
    ("deploy/libvirt/domain.xml", "examples/domain.xml"),
    ("deploy/systemd/xdp-imds.service", "xdp-imds.service"),
];

/// Writes the archive of an architecture, whose binary and pages are built, to `out`.
fn make_archive(
    tree: &Tree,
    architecture: Architecture,
    profile: &str,
    about: &About,
    out: &Path,
) -> Result<()> {
    let name = format!("xdp-imds-{VERSION}-{}", architecture.triple());
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let products = tree.products(architecture, profile);
    let mut entries = vec![
        LayerEntry::program(&format!("{name}/xdp-imds"), read(&products.join("xdp-imds"))?),
        LayerEntry::program(
            &format!("{name}/libvirt-hook"),
            read(&tree.top().join("deploy/libvirt/xdp-imds"))?,
        ),
    ];
    for (from, to) in FILES {
        entries.push(LayerEntry::file(&format!("{name}/{to}"), read(&tree.top().join(from))?));
    }
    for (from, to) in
        [("man1", "man/man1"), ("bash", "completions"), ("zsh", "completions"), ("fish", "completions")]
    {
        let place = products.join("pages").join(from);
        for file in fs::read_dir(&place).with_context(|| format!("cannot list {}", place.display()))? {
            let path = file?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            entries.push(LayerEntry::file(&format!("{name}/{to}/{file}"), read(&path)?));
        }
    }
    let archive = out.join(format!("{name}.tar.gz"));
    fs::write(&archive, layout::write_layer(entries, about.epoch())?.gzip)
        .with_context(|| format!("cannot write {}", archive.display()))
}

// Writes the Helm chart as the archive that `helm package` would write, but the same whenever it is made.

/// The directory of all files in the archive, which Helm wants to be the chart's name.
const NAME: &str = "xdp-imds";

/// Writes the chart of a source tree to `out`.
fn make_chart(top: &Path, about: &About, out: &Path) -> Result<()> {
    let path = out.join(format!("{NAME}-{VERSION}.tgz"));
    fs::write(&path, layout::write_layer(entries(&top.join(CHART))?, about.epoch())?.gzip)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Returns the files below a chart's directory.
fn entries(chart: &Path) -> Result<Vec<LayerEntry>> {
    let (mut places, mut entries) = (vec![chart.to_owned()], Vec::new());
    while let Some(place) = places.pop() {
        for file in fs::read_dir(&place).with_context(|| format!("cannot list {}", place.display()))? {
            let path = file?.path();
            if path.is_dir() {
                places.push(path);
                continue;
            }
            let name = format!("{NAME}/{}", path.strip_prefix(chart)?.to_string_lossy());
            let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            entries.push(LayerEntry::file(&name, bytes));
        }
    }
    Ok(entries)
}

// Installs and uses the packages of a release as their users do, on disposable copies of their systems.
//
// Each system is made once, by mmdebstrap, and kept below the target directory. An overlay over it takes the changes.
// A Fedora cannot be made on Debian, so Debian's `rpm` installs the RPM package into a Debian system, without
// judging dependencies; its `dnf` judges them, with a package that stands for those that a Fedora has.

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
    test ! -e "$1/usr/share/doc/xdp-imds"
"#;

/// Tries every package for this machine's architecture in the directory of a release.
fn try_packages(out: &Path) -> Result<()> {
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
        deb::run_on_overlay(&system, &[&package, &record], &Scripts { outside: "", inside: &inside })
            .with_context(|| format!("{} does not install on {suite}", package.display()))?;
        println!("dist: {suite}: apt-get installed, used and purged {}", package.display());
    }
    let package = out.join(format!("xdp-imds-{VERSION}-1.{}.rpm", here.name()));
    deb::run_on_overlay(&system(SUITES[0])?, &[&package], &Scripts { outside: RPM_OUTSIDE, inside: "" })
        .with_context(|| format!("{} does not install", package.display()))?;
    println!(
        "dist: rpm installed, used, upgraded and erased {} (on Debian, without dependencies)",
        package.display()
    );
    rpm::run(out, &systems, here)?;
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::fs;

    use super::{SUMS, empty, entries, same};
    use crate::image::layout;
    use crate::manifests::CHART;

    #[test]
    fn a_difference_of_two_releases_is_named() {
        let of = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, digest)| ((*name).into(), (*digest).into())).collect()
        };
        let first = of(&[("a.deb", "1"), ("a.rpm", "2")]);
        same(&first, &first.clone()).expect("equal");
        for (second, names) in [
            (of(&[("a.deb", "1"), ("a.rpm", "3")]), "a.rpm"),
            (of(&[("a.deb", "1")]), "a.rpm"),
            (of(&[("a.deb", "0"), ("a.rpm", "2"), ("b", "4")]), "a.deb, b"),
        ] {
            let error = same(&first, &second).expect_err("they differ").to_string();
            assert!(error.ends_with(names), "{error}");
        }
    }

    #[test]
    fn only_an_older_release_is_replaced() {
        for (files, is_replaced) in [
            (vec![SUMS, "other"], true),
            (vec!["xdp-imds_0.1.0-1_amd64.deb"], true),
            (vec![], true),
            (vec!["thesis.tex"], false),
        ] {
            let room = tempfile::tempdir().expect("a directory");
            let out = room.path().join("dist");
            fs::create_dir(&out).expect("made");
            for file in &files {
                fs::write(out.join(file), "x").expect("written");
            }
            assert_eq!(empty(&out).is_ok(), is_replaced, "{files:?}");
            let left = fs::read_dir(&out).expect("a directory").count();
            assert_eq!(left, if is_replaced { 0 } else { files.len() }, "{files:?}");
        }
    }

    #[test]
    fn the_archive_has_every_file_of_the_chart_below_its_name() {
        let entries = entries(&shell::top().join(CHART)).expect("files");
        let written = layout::write_layer(entries, 7).expect("an archive");
        let mut archive = tar::Archive::new(&*written.tar);
        let path = |entry: std::io::Result<tar::Entry<'_, &[u8]>>| {
            entry.expect("an entry").path().expect("a path").to_string_lossy().into_owned()
        };
        let found: BTreeSet<_> = archive.entries().expect("entries").map(path).collect();
        for name in ["Chart.yaml", "README.md", "values.schema.json", "templates/daemonset.yaml"] {
            assert!(found.contains(&format!("xdp-imds/{name}")), "{name}: {found:?}");
        }
        assert!(found.iter().all(|path| path.starts_with("xdp-imds/")), "{found:?}");
    }
}
