//! Writes the archive with the static binary, for systems whose package manager reads neither .deb nor .rpm.

use super::VERSION;
use crate::image::binary::Tree;
use crate::image::layer::{self, Entry};
use crate::image::layout::About;
use anyhow::{Context as _, Result};
use shell::architecture::Architecture;
use std::fs;
use std::path::Path;

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
pub(super) fn make(
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
        Entry::program(&format!("{name}/xdp-imds"), read(&products.join("xdp-imds"))?),
        Entry::program(&format!("{name}/libvirt-hook"), read(&tree.top().join("deploy/libvirt/xdp-imds"))?),
    ];
    for (from, to) in FILES {
        entries.push(Entry::file(&format!("{name}/{to}"), read(&tree.top().join(from))?));
    }
    for (from, to) in
        [("man1", "man/man1"), ("bash", "completions"), ("zsh", "completions"), ("fish", "completions")]
    {
        let place = products.join("pages").join(from);
        for file in fs::read_dir(&place).with_context(|| format!("cannot list {}", place.display()))? {
            let path = file?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            entries.push(Entry::file(&format!("{name}/{to}/{file}"), read(&path)?));
        }
    }
    let archive = out.join(format!("{name}.tar.gz"));
    fs::write(&archive, layer::write(entries, about.epoch())?.gzip)
        .with_context(|| format!("cannot write {}", archive.display()))
}
