//! `cargo xtask dist`: makes every file of a release, and proves that they can be made again.
//!
//! For each architecture: an archive with the static binary, a Debian package, an RPM package and a bill of materials.
//! For all together: an OCI image, the Helm chart, and `SHA256SUMS`. The same source and toolchain make the same bytes
//! wherever and whenever they are built. Beside them, repositories of APT and DNF, which are made of the packages.

mod archive;
mod chart;
mod repositories;
mod rpm;
mod trial;

use crate::deb;
use crate::image::binary::{Tree, native};
use crate::image::layer::{self, Entry};
use crate::image::layout::{self, About, Image};
use crate::image::{self, bill, sha256};
use anyhow::{Context as _, Result, bail, ensure};
use shell::architecture::Architecture;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

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
    /// Install and use the packages of this machine's architecture on throw-away copies of Debian 12 and 13, as files
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
        trial::run(&out)?;
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
    chart::make(tree.top(), about, out)?;
    let digests = digests(out)?;
    let lines: String = digests.iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect();
    fs::write(out.join(SUMS), lines)?;
    repositories::make(tree.top(), out, &out.join(repositories::NAME), None)?;
    eprintln!("dist: {} files in {}, {} s", digests.len(), out.display(), started.elapsed().as_secs());
    Ok(digests)
}

/// Makes the files of one architecture, and returns its image.
fn one(tree: &Tree, architecture: Architecture, profile: &str, about: &About, out: &Path) -> Result<Image> {
    let image = image::make(tree, architecture, profile, about)?;
    let package = deb::of_static(tree, architecture, profile, about, out)?;
    deb::contents(&package)?;
    rpm::make(&package, architecture, about, tree.top(), out)?;
    archive::make(tree, architecture, profile, about, out)?;
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
        bail!("{} has files that are not of a release; name another directory by --out", out.display());
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
                entries.push(Entry::file(&name, fs::read(&path)?));
            }
        }
    }
    Ok(layer::write(entries, about.epoch())?.tar)
}

#[cfg(test)]
mod tests {
    use super::{SUMS, empty, same};
    use std::collections::BTreeMap;
    use std::fs;

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
}
