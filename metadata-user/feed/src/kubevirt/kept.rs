//! The kept file: the last known VMIs, for a start while the API server is unreachable.
//!
//! VMIs may contain user-data, so the file has mode 0600. It is replaced as a whole. It holds neither the place of a
//! pod nor the content of Secrets; the agent finds both on the node.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Vmi;
use metadata_state::private_file;

/// The file's name in the state directory.
pub const FILE: &str = "kubevirt.vmis";

/// Most octets of the file. The encoder omits the VMIs that do not fit; later keys go first.
const MAX_OCTETS: usize = 64 << 20;

const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Head {
    #[serde(rename = "xdp-imds-vmis")]
    version: u32,
}

/// Encodes the file: a line with its format, then one VMI on each line.
pub(super) fn encode<'a>(vmis: impl Iterator<Item = &'a Vmi>) -> io::Result<Vec<u8>> {
    encode_within(MAX_OCTETS, vmis)
}

fn encode_within<'a>(limit: usize, vmis: impl Iterator<Item = &'a Vmi>) -> io::Result<Vec<u8>> {
    let mut octets = serde_json::to_vec(&Head { version: VERSION })?;
    octets.push(b'\n');
    for vmi in vmis {
        let line = serde_json::to_vec(vmi)?;
        if octets.len() + line.len() + 1 > limit {
            continue;
        }
        octets.extend(line);
        octets.push(b'\n');
    }
    Ok(octets)
}

/// Replaces the file.
pub(super) fn write(path: &Path, octets: &[u8]) -> io::Result<()> {
    private_file::replace(path, octets)
}

/// Reads the file; a missing file is an empty list.
///
/// # Errors
/// The file is unreadable or has another format. The function skips a line that is no VMI, because the API server will
/// send that VMI again.
pub(super) fn read(path: &Path) -> io::Result<Vec<Vmi>> {
    let mut octets = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(MAX_OCTETS as u64).read_to_end(&mut octets)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut lines = octets.split(|octet| *octet == b'\n');
    let head = lines.next().and_then(|line| serde_json::from_slice::<Head>(line).ok());
    if head.is_none_or(|head| head.version != VERSION) {
        return Err(io::Error::other("expected a list of VMIs that this version has written"));
    }
    Ok(lines.filter(|line| !line.is_empty()).filter_map(|line| Vmi::read(line).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::{FILE, encode, encode_within, read, write};
    use crate::kubevirt::Vmi;
    use std::os::unix::fs::PermissionsExt as _;

    fn vmis() -> Vec<Vmi> {
        let vmi = include_bytes!("translate/fixtures/vmi.json");
        let first = Vmi::read(vmi).expect("a VMI");
        let mut second = first.clone();
        second.metadata.name = "web-2".into();
        vec![first, second]
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
    fn a_cut_file_gives_its_complete_vmis_and_another_format_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(FILE);
        let whole = encode(vmis().iter()).expect("JSON");
        write(&path, &whole[..whole.len() - 10]).expect("a file");
        assert_eq!(read(&path).expect("a list"), vmis()[..1]);
        for other in [&b""[..], b"{}", b"{\"xdp-imds-vmis\":2}\n"] {
            write(&path, other).expect("a file");
            read(&path).expect_err("another kind");
        }
    }

    #[test]
    fn vmis_beyond_the_octets_of_the_file_are_omitted() {
        let one = encode(vmis()[..1].iter()).expect("JSON");
        assert_eq!(encode_within(one.len(), vmis().iter()).expect("JSON"), one);
    }
}
