//! The kept file: the last known VMIs. The agent starts with them while the API server is unreachable.
//!
//! VMIs may contain user-data, so the file has mode 0600. It is replaced as a whole. It holds neither the place of a
//! pod nor the content of Secrets; the agent finds both on the node.

use std::io::{self, Cursor};
use std::path::Path;

use super::Vmi;
use crate::state::{StateFileKind, private_file};

/// The file's name in the state directory.
pub const FILE: &str = "kubevirt.vmis";

/// The encoder writes in the order of the core, and omits the VMIs that do not fit.
const FORM: StateFileKind = StateFileKind { kind: "vmis", version: 1, oldest: 1, bytes: 64 << 20 };

/// First line of the files that earlier agents wrote: VMIs follow, one per line, without a digest.
const FORMER_HEAD: &[u8] = b"{\"xdp-imds-vmis\":1}\n";

/// Encodes the file.
pub(super) fn encode<'a>(vmis: impl Iterator<Item = &'a Vmi>) -> io::Result<Vec<u8>> {
    encode_as(FORM, vmis)
}

fn encode_as<'a>(form: StateFileKind, vmis: impl Iterator<Item = &'a Vmi>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    form.write(vmis.map(|vmi| Ok(serde_json::to_vec(vmi)?)), &mut bytes)?;
    Ok(bytes)
}

/// Replaces the file.
pub(super) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    FORM.spare_other_version(path)?;
    private_file::replace(path, bytes)
}

/// Reads the file; a missing file is an empty list.
///
/// # Errors
/// The file is unreadable, damaged, or of another kind. The function skips a line that is not a VMI, because the API
/// server will send that VMI again.
pub(super) fn read(path: &Path) -> io::Result<Vec<Vmi>> {
    let Some(bytes) = private_file::read(path, FORM.bytes)? else { return Ok(Vec::new()) };
    let mut vmis = Vec::new();
    if let Some(lines) = bytes.strip_prefix(FORMER_HEAD) {
        vmis.extend(lines.split(|byte| *byte == b'\n').filter_map(|line| Vmi::read(line).ok()));
        return Ok(vmis);
    }
    let read = FORM.read(Cursor::new(bytes), |line| {
        vmis.extend(Vmi::read(line));
        Ok(())
    });
    read.map(|()| vmis).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::{FILE, FORM, StateFileKind, encode, encode_as, read, write};
    use crate::kubevirt::Vmi;
    use std::os::unix::fs::PermissionsExt as _;

    fn vmis() -> Vec<Vmi> {
        let vmi = include_bytes!("translate/fixtures/vmi.json");
        let mut first = Vmi::read(vmi).expect("a VMI");
        // Release 0.1.0 kept neither owner references nor MACs. It ignores them, so they need no version of their own.
        first.metadata.owner_references = None;
        first.status.interfaces.iter_mut().for_each(|nic| nic.mac = None);
        let mut second = first.clone();
        second.metadata.name = "web-2".into();
        vec![first, second]
    }

    #[test]
    fn formats_of_every_release_are_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(FILE);
        golden::check(FILE, FORM.version, &encode(vmis().iter()).expect("JSON"));
        for sample in golden::all(FILE) {
            std::fs::write(&path, &sample.bytes).expect("a file");
            assert_eq!(read(&path).expect("a list"), vmis(), "{}", sample.release);
        }
    }

    #[test]
    fn a_file_of_a_later_version_is_refused_and_kept_when_another_is_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(FILE);
        let mut later = Vec::new();
        StateFileKind { version: 2, ..FORM }.write([Ok(b"{}".to_vec())], &mut later).expect("bytes");
        std::fs::write(&path, &later).expect("a file");
        let text = read(&path).expect_err("a refusal").to_string();
        assert!(text.contains("vmis of version 1, found version 2"), "{text}");
        write(&path, &encode(vmis().iter()).expect("JSON")).expect("a file");
        assert_eq!(read(&path).expect("a list"), vmis());
        assert_eq!(std::fs::read(dir.path().join("kubevirt.vmis.v2")).expect("it is kept"), later);
    }

    #[test]
    fn the_kept_file_is_private_and_reads_back() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(FILE);
        assert!(read(&path).expect("no file is no fault").is_empty());
        write(&path, &encode(vmis().iter()).expect("JSON")).expect("a file");
        assert_eq!(read(&path).expect("a list"), vmis());
        assert_eq!(path.metadata().expect("a file").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_file_that_an_earlier_agent_wrote_is_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(FILE);
        let lines: Vec<_> = vmis().iter().map(|vmi| serde_json::to_string(vmi).expect("JSON")).collect();
        write(&path, format!("{{\"xdp-imds-vmis\":1}}\n{}\n", lines.join("\n")).as_bytes()).expect("a file");
        assert_eq!(read(&path).expect("a list"), vmis());
    }

    #[test]
    fn a_file_that_is_damaged_or_of_another_kind_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(FILE);
        let whole = encode(vmis().iter()).expect("JSON");
        for other in [&whole[..whole.len() - 10], b"", b"{}", b"{\"xdp-imds-vmis\":2}\n"] {
            write(&path, other).expect("a file");
            read(&path).expect_err("another kind");
        }
    }

    #[test]
    fn vmis_beyond_the_bytes_of_the_file_are_omitted() {
        let [first, both] = [1, 2].map(|count| encode(vmis()[..count].iter()).expect("JSON"));
        let form = StateFileKind { bytes: both.len() - 1, ..FORM };
        assert_eq!(encode_as(form, vmis().iter()).expect("JSON"), first);
    }
}
