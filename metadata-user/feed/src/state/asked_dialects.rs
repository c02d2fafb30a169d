//! The dialects that guests have asked for. The next agent renders them before their guests ask again.

use std::collections::BTreeMap;
use std::io::{self, Cursor};
use std::path::Path;

use serde::{Deserialize, Serialize};

use metadata_content::record::{Dialect, Dialects};

use crate::state::{StateFileKind, private_file};

/// The file's name in the state directory.
pub const FILE: &str = "dialects";

/// About 100 bytes per VM. VMs that do not fit are left out, in the order of their UUIDs.
const FORM: StateFileKind = StateFileKind { kind: "dialects", version: 1, oldest: 1, bytes: 16 << 20 };

/// Dialects by the UUID of the VM.
pub type DialectsByUuid = BTreeMap<String, Dialects>;

#[derive(Serialize, Deserialize)]
struct Line {
    vm: String,
    dialects: Vec<serde_json::Value>,
}

/// Replaces the file.
///
/// # Errors
/// The error of the first step that fails; the file is then unchanged.
pub fn write(path: &Path, asked: &DialectsByUuid) -> io::Result<()> {
    let line = |(vm, dialects): (&String, &Dialects)| {
        let dialects = dialects.iter().map(|dialect| dialect.as_str().into()).collect();
        Ok(serde_json::to_vec(&Line { vm: vm.clone(), dialects })?)
    };
    let mut bytes = Vec::new();
    FORM.write(asked.iter().map(line), &mut bytes)?;
    FORM.spare_other_version(path)?;
    private_file::replace(path, &bytes)
}

/// Reads the file; no VM has asked if there is none. Skips dialects that this release does not have.
///
/// # Errors
/// The file is unreadable, damaged, or of another kind.
pub fn read(path: &Path) -> io::Result<DialectsByUuid> {
    let mut asked = DialectsByUuid::new();
    let Some(bytes) = private_file::read(path, FORM.bytes)? else { return Ok(asked) };
    let take = |line: &[u8]| {
        let Line { vm, dialects } = serde_json::from_slice(line).map_err(|_| "a VM and its dialects")?;
        let known = dialects.into_iter().filter_map(|name| serde_json::from_value::<Dialect>(name).ok());
        asked.insert(vm, known.collect());
        Ok(())
    };
    FORM.read(Cursor::new(bytes), take).map_err(io::Error::other)?;
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use super::{Dialect, DialectsByUuid, FILE, FORM, StateFileKind, read, write};
    use std::fs;

    #[test]
    fn formats_of_every_release_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE);
        write(&path, &asked()).expect("a file");
        golden::check(FILE, FORM.version, &fs::read(&path).expect("bytes"));
        for sample in golden::all(FILE) {
            fs::write(&path, &sample.bytes).expect("a file");
            assert_eq!(read(&path).expect("a table"), asked(), "{}", sample.release);
        }
    }

    #[test]
    fn a_table_of_a_later_version_is_refused_and_kept_when_another_is_written() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE);
        let mut later = Vec::new();
        let line = br#"{"vm":"7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d","dialects":"all"}"#;
        StateFileKind { version: 2, ..FORM }.write([Ok(line.to_vec())], &mut later).expect("bytes");
        fs::write(&path, &later).expect("a file");
        let text = read(&path).expect_err("a refusal").to_string();
        assert!(text.contains("dialects of version 1, found version 2"), "{text}");
        write(&path, &asked()).expect("written");
        assert_eq!(read(&path).expect("a table"), asked());
        assert_eq!(fs::read(path.with_extension("v2")).expect("it is kept"), later);
    }

    fn asked() -> DialectsByUuid {
        [
            ("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d", &[Dialect::Ec2][..]),
            ("8c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d", &[Dialect::NoCloud, Dialect::OpenStack]),
        ]
        .into_iter()
        .map(|(vm, dialects)| (vm.to_owned(), dialects.iter().copied().collect()))
        .collect()
    }

    #[test]
    fn the_file_reads_back_and_its_absence_is_an_empty_table() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE);
        assert!(read(&path).expect("no file is no fault").is_empty());
        write(&path, &asked()).expect("a file");
        assert_eq!(read(&path).expect("a table"), asked());
    }

    #[test]
    fn a_dialect_of_another_release_is_skipped_and_a_damaged_file_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE);
        let line = br#"{"vm":"7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d","dialects":["ec2","new-cloud"]}"#;
        let mut bytes = Vec::new();
        FORM.write([Ok(line.to_vec())], &mut bytes).expect("bytes");
        fs::write(&path, &bytes).expect("a file");
        let (_, found) = read(&path).expect("a table").pop_first().expect("a VM");
        assert_eq!(found.iter().collect::<Vec<_>>(), [Dialect::Ec2]);
        fs::write(&path, &bytes[..bytes.len() - 5]).expect("a file");
        read(&path).expect_err("the file is cut");
    }
}
