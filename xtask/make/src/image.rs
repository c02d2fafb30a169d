//! `cargo xtask image`: writes the agent as an OCI image, without a container daemon.
//!
//! The image has one layer without a base. The layer holds the static binary (musl), the eBPF objects, the licences and
//! a list of the linked crates. It is written as an OCI image layout (<https://github.com/opencontainers/image-spec>,
//! 1.1):
//!
//! ```sh
//! cargo xtask image && skopeo copy oci:target/image:latest docker://registry.example/xdp-imds:0.1.0
//! ```
//!
//! The same source and toolchain make the same bytes wherever they are built. `--check` builds a copy of the tree in
//! another directory and compares. `--try` serves a guest from a container that has the DaemonSet's privileges and no
//! others.

pub(crate) mod bill;
pub(crate) mod documents;
pub(crate) mod layout;

pub(crate) use layout::sha256;

use anyhow::{Context as _, Result, ensure};
use layout::LayerEntry;
use layout::{About, Image};
use shell::architecture::Architecture;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The architecture of the image. `cargo xtask dist` makes one for every architecture.
const IMAGE: Architecture = Architecture::X86;

/// What to build, and which checks to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory of the layout [default: target/image]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The image's name in the layout
    #[arg(long, value_name = "NAME", default_value = "latest")]
    tag: String,
    /// Cargo's build profile; `quick` is for tests and takes a third of the time
    #[arg(long, value_name = "NAME", default_value = "release")]
    profile: String,
    /// Build again from a copy of the tree in another directory, and fail unless both builds have the same digest
    #[arg(long)]
    check: bool,
    /// Serve a guest in a namespace from a container of the image (needs root and runc)
    #[arg(long = "try")]
    trial: bool,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| shell::target().join("image"));
    let started = Instant::now();
    // Read once, because a copy has no history and the tree may change during the build.
    let about = About::of(shell::top())?;
    let image = make(&Tree::here()?, IMAGE, &args.profile, &about)?;
    layout::write(std::slice::from_ref(&image), &out, &args.tag)?;
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
        let mut lab = match shell::built("xdp-imds-lab") {
            Some(lab) => Command::new(lab),
            None => shell::cargo(["run", "--quiet", "--package", "xdp-imds-lab", "--"]),
        };
        shell::run(lab.arg("image-trial").arg(out.canonicalize()?).args([&args.tag, &image.digest()]))?;
    }
    Ok(())
}

/// Builds a copy of the tree in another directory and compares the digests.
fn check(first: &Image, profile: &str, about: &About) -> Result<()> {
    let started = Instant::now();
    let elsewhere = Tree::copy()?;
    let second = make(&elsewhere, IMAGE, profile, about)?;
    ensure!(
        first.digest() == second.digest(),
        "two builds of the same source differ: {} here, {} in {}; the binary's SHA-256 is {} here, {} there",
        first.digest(),
        second.digest(),
        elsewhere.top().display(),
        first.program,
        second.program
    );
    println!(
        "a build in {} has the same digest ({} s)",
        elsewhere.top().display(),
        started.elapsed().as_secs()
    );
    Ok(())
}

/// Builds a tree for an architecture and makes the image.
pub(crate) fn make(tree: &Tree, architecture: Architecture, profile: &str, about: &About) -> Result<Image> {
    let binary = tree.build(architecture, profile)?;
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let top = tree.top();
    let mut entries = vec![LayerEntry::program("usr/bin/xdp-imds", read(&binary)?)];
    for (to, from) in [
        ("usr/share/xdp-imds/xdp-imds.bpf.o", "metadata-ebpf/prebuilt/xdp-imds.bpf.o"),
        ("usr/share/xdp-imds/port-stub.bpf.o", "metadata-ebpf/prebuilt/port-stub.bpf.o"),
        ("usr/share/doc/xdp-imds/LICENSE-APACHE", "LICENSE-APACHE"),
        ("usr/share/doc/xdp-imds/LICENSE-MIT", "LICENSE-MIT"),
    ] {
        entries.push(LayerEntry::file(to, read(&top.join(from))?));
    }
    entries.push(LayerEntry::file(
        "usr/share/doc/xdp-imds/bill-of-materials.cdx.json",
        bill::of(top, architecture)?,
    ));
    // Runtimes mount over these directories, and some runtimes cannot make them.
    for directory in ["etc/xdp-imds", "run/xdp-imds", "var/lib/xdp-imds", "proc", "sys", "dev"] {
        entries.push(LayerEntry::directory(directory));
    }
    let (size, program) = (entries[0].bytes.len(), sha256(&entries[0].bytes));
    let layer = layout::write_layer(entries, about.epoch())?;
    Ok(Image::new(about, architecture, layer, size, program))
}

/// Formats bytes as MiB.
fn size(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

// Builds the static binary, identical wherever its source lies.

/// A source tree of the project.
#[derive(Debug)]
pub(crate) struct Tree {
    top: PathBuf,
    target: PathBuf,
    /// Deletes a copied tree when dropped.
    _copy: Option<tempfile::TempDir>,
}

impl Tree {
    /// Returns the tree that this program was built from.
    pub(crate) fn here() -> Result<Self> {
        Ok(Self { top: shell::top().to_owned(), target: shell::target().join("image-build"), _copy: None })
    }

    /// Copies all tracked and untracked files, including uncommitted changes, to a temporary directory.
    pub(crate) fn copy() -> Result<Self> {
        let room = tempfile::Builder::new().prefix("xdp-imds-elsewhere-").tempdir()?;
        let top = room.path().join("source");
        let listed = Command::new("git")
            .arg("-C")
            .arg(shell::top())
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .output()
            .context("cannot run git")?;
        ensure!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr).trim());
        let names = String::from_utf8(listed.stdout).context("a file name is not UTF-8")?;
        for name in names.split_terminator('\0') {
            let (from, to) = (shell::top().join(name), top.join(name));
            // Deleted, but the deletion is not committed yet.
            if !from.exists() {
                continue;
            }
            fs::create_dir_all(to.parent().context("the file's path has no directory")?)?;
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
        Ok(Self { target: room.path().join("target"), top, _copy: Some(room) })
    }

    /// Returns the top directory of the tree.
    pub(crate) fn top(&self) -> &Path {
        &self.top
    }

    /// Returns the Cargo target directory of the tree.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// Builds the agent for an architecture with a Cargo profile; returns the path of the binary.
    pub(crate) fn build(&self, architecture: Architecture, profile: &str) -> Result<PathBuf> {
        let home = std::env::var_os("CARGO_HOME").map_or_else(
            || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cargo"),
            PathBuf::from,
        );
        // The last matching rule applies, and the target directory may lie below the source.
        let flags = vec![
            format!("--remap-path-prefix={}=/xdp-imds", self.top.display()),
            format!("--remap-path-prefix={}=/cargo", home.display()),
            format!("--remap-path-prefix={}=/target", self.target.display()),
        ];
        let prefix = format!(
            "-ffile-prefix-map={}=/cargo -ffile-prefix-map={}=/target",
            home.display(),
            self.target.display()
        );
        let mut cargo = architecture.build_agent(profile, &self.target, flags)?;
        cargo.env(format!("CFLAGS_{}", architecture.variable()), prefix).current_dir(&self.top);
        shell::run(&mut cargo)?;
        Ok(self.products(architecture, profile).join("xdp-imds"))
    }

    /// Writes manual pages and completions beside the binary for an architecture. They are the same for all, so the
    /// binary of this machine writes them; it must be built.
    pub(crate) fn write_pages(&self, architecture: Architecture, profile: &str) -> Result<PathBuf> {
        let native = self.products(native()?, profile).join("xdp-imds");
        documents::write(&native, &self.products(architecture, profile))
    }

    /// Returns the directory of what a build with a Cargo profile makes.
    pub(crate) fn products(&self, architecture: Architecture, profile: &str) -> PathBuf {
        architecture.products(&self.target, profile)
    }
}

/// Returns the architecture of this machine.
pub(crate) fn native() -> Result<Architecture> {
    Architecture::here().with_context(|| format!("the agent is not built for {}", std::env::consts::ARCH))
}
