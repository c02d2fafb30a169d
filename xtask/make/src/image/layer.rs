//! Writes the image's one layer: a tar whose entries are sorted by name and have the same owner and time.

use anyhow::Result;
use flate2::{Compression, GzBuilder};
use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;
use tar::{Builder, EntryType, Header};

/// A file or directory of the layer.
#[derive(Debug)]
pub(crate) struct Entry {
    path: String,
    mode: u32,
    /// The content; empty for a directory.
    pub(crate) bytes: Vec<u8>,
    is_directory: bool,
}

impl Entry {
    /// Returns a program that everybody may run.
    pub(crate) fn program(path: &str, bytes: Vec<u8>) -> Self {
        Self { path: path.into(), mode: 0o755, bytes, is_directory: false }
    }

    /// Returns a file that everybody may read.
    pub(crate) fn file(path: &str, bytes: Vec<u8>) -> Self {
        Self { path: path.into(), mode: 0o644, bytes, is_directory: false }
    }

    /// Returns a directory that everybody may enter.
    pub(crate) fn directory(path: &str) -> Self {
        Self { path: path.into(), mode: 0o755, bytes: Vec::new(), is_directory: true }
    }
}

/// The bytes of a layer in its two forms.
#[derive(Debug)]
pub(crate) struct Layer {
    /// The form that runtimes unpack. Its digest names the layer (`diff_id`).
    pub(crate) tar: Vec<u8>,
    /// The form that registries store.
    pub(crate) gzip: Vec<u8>,
}

/// Writes the entries and all directories above them. `epoch`, in Unix seconds, is the time of every entry.
pub(crate) fn write(mut entries: Vec<Entry>, epoch: u64) -> Result<Layer> {
    let above: BTreeSet<String> = entries
        .iter()
        .flat_map(|entry| Path::new(&entry.path).ancestors().skip(1))
        .map(|path| path.to_string_lossy().into_owned())
        .filter(|path| !path.is_empty())
        .collect();
    let known: BTreeSet<_> = entries.iter().map(|entry| entry.path.clone()).collect();
    entries.extend(above.difference(&known).map(|path| Entry::directory(path)));
    entries.sort_by(|one, other| one.path.cmp(&other.path));
    let mut tar = Builder::new(Vec::new());
    for entry in &entries {
        let mut header = Header::new_ustar();
        header.set_entry_type(if entry.is_directory { EntryType::Directory } else { EntryType::Regular });
        header.set_mode(entry.mode);
        header.set_size(entry.bytes.len() as u64);
        header.set_mtime(epoch);
        header.set_uid(0);
        header.set_gid(0);
        let path = if entry.is_directory { format!("{}/", entry.path) } else { entry.path.clone() };
        tar.append_data(&mut header, path, &*entry.bytes)?;
    }
    let tar = tar.into_inner()?;
    // The header has no name and no time, so that the same input gives the same output.
    let mut gzip = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    gzip.write_all(&tar)?;
    Ok(Layer { gzip: gzip.finish()?, tar })
}

#[cfg(test)]
mod tests {
    use super::{Entry, write};

    fn names(tar: &[u8]) -> Vec<(String, u64, u64)> {
        let mut archive = tar::Archive::new(tar);
        let entries = archive.entries().expect("entries").map(|entry| entry.expect("an entry"));
        let facts = entries.map(|entry| {
            let header = entry.header();
            let path = entry.path().expect("a path").to_string_lossy().into_owned();
            (path, header.mtime().expect("a time"), header.uid().expect("a user"))
        });
        facts.collect()
    }

    #[test]
    fn a_layer_is_the_same_whatever_the_order_of_its_entries() {
        let entries = || {
            vec![Entry::program("usr/bin/a", vec![1]), Entry::file("etc/b", vec![2]), Entry::directory("run")]
        };
        let first = write(entries(), 7).expect("a layer");
        let mut turned = entries();
        turned.reverse();
        let second = write(turned, 7).expect("a layer");
        assert_eq!((&first.tar, &first.gzip), (&second.tar, &second.gzip));
        let expected =
            ["etc/", "etc/b", "run/", "usr/", "usr/bin/", "usr/bin/a"].map(|path| (path.to_owned(), 7, 0));
        assert_eq!(names(&first.tar), expected);
    }

    #[test]
    fn a_changed_byte_changes_the_layer() {
        let of = |byte| write(vec![Entry::file("a", vec![byte])], 0).expect("a layer").gzip;
        assert_ne!(of(1), of(2));
    }
}
