//! `cargo xtask image`: the agent as an OCI image, without a daemon.
//!
//! A static binary (musl), the eBPF object it carries, its licences and a list of what went into it, in one layer on
//! nothing, written as an OCI image layout (<https://github.com/opencontainers/image-spec>, 1.1):
//!
//! ```sh
//! cargo xtask image && skopeo copy oci:target/image:latest docker://registry.example/xdp-imds:0.1.0
//! ```
//!
//! The same source and toolchain make the same octets wherever they are built: `--check` builds a copy of the tree
//! elsewhere, and compares. `--try` serves a guest from a container with what the DaemonSet grants and nothing else.

mod bill;
pub(crate) mod binary;
mod layer;
mod layout;

use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use binary::Tree;
use layer::Entry;
pub(crate) use layout::sha256;
use layout::{About, Image};

/// What to do.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to write the layout [default: target/image]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The image's name in the layout
    #[arg(long, value_name = "NAME", default_value = "latest")]
    tag: String,
    /// Cargo's profile to build by; `quick` is for trying, and takes a third of the time
    #[arg(long, value_name = "NAME", default_value = "release")]
    profile: String,
    /// Build a second time, from a copy of the tree in another place, and fail unless both have one digest
    #[arg(long)]
    check: bool,
    /// Then serve a guest in a namespace from inside a container of it (needs root and runc)
    #[arg(long = "try")]
    trial: bool,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| shell::target().join("image"));
    let started = Instant::now();
    // Once: a copy has no history of its own, and somebody may work on the tree meanwhile.
    let about = About::of(shell::top())?;
    let image = make(&Tree::here()?, &args.profile, &about)?;
    image.write(&out, &args.tag)?;
    println!("{}  {}:{}", image.digest(), out.display(), args.tag);
    println!(
        "binary {}, layer {} compressed, {} s",
        size(image.binary),
        size(image.compressed()),
        started.elapsed().as_secs()
    );
    if args.check {
        check(&image, &args.profile, &about)?;
    }
    if args.trial {
        let words = ["run", "--quiet", "--package", "xdp-imds-lab", "--", "image-trial"];
        shell::run(shell::cargo(words).arg(out.canonicalize()?).args([&args.tag, &image.digest()]))?;
    }
    Ok(())
}

/// Builds again elsewhere.
fn check(first: &Image, profile: &str, about: &About) -> Result<()> {
    let started = Instant::now();
    let elsewhere = Tree::copy()?;
    let second = make(&elsewhere, profile, about)?;
    ensure!(
        first.digest() == second.digest(),
        "two builds of one source differ: {} here, {} in {}; the program's SHA-256 is {} here, {} there",
        first.digest(),
        second.digest(),
        elsewhere.top().display(),
        first.program,
        second.program
    );
    println!(
        "the same digest when built in {} ({} s)",
        elsewhere.top().display(),
        started.elapsed().as_secs()
    );
    Ok(())
}

fn make(tree: &Tree, profile: &str, about: &About) -> Result<Image> {
    let binary = tree.build(profile)?;
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let top = tree.top();
    let mut entries = vec![Entry::program("usr/bin/xdp-imds", read(&binary)?)];
    for (to, from) in [
        ("usr/share/xdp-imds/xdp-imds.bpf.o", "metadata-ebpf/prebuilt/xdp-imds.bpf.o"),
        ("usr/share/xdp-imds/port-stub.bpf.o", "metadata-ebpf/prebuilt/port-stub.bpf.o"),
        ("usr/share/doc/xdp-imds/LICENSE-APACHE", "LICENSE-APACHE"),
        ("usr/share/doc/xdp-imds/LICENSE-MIT", "LICENSE-MIT"),
    ] {
        entries.push(Entry::file(to, read(&top.join(from))?));
    }
    entries.push(Entry::file("usr/share/doc/xdp-imds/bill-of-materials.cdx.json", bill::of(top)?));
    // What a runtime mounts over, where it may not make directories.
    for directory in ["etc/xdp-imds", "run/xdp-imds", "var/lib/xdp-imds", "proc", "sys", "dev"] {
        entries.push(Entry::directory(directory));
    }
    let (size, program) = (entries[0].octets.len(), sha256(&entries[0].octets));
    let layer = layer::write(entries, about.epoch())?;
    Ok(Image::new(about, layer, size, program))
}

/// A number of octets for people.
fn size(octets: usize) -> String {
    format!("{:.1} MiB", octets as f64 / f64::from(1 << 20))
}
