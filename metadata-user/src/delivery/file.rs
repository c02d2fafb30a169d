//! Sinks that are files.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::SinkError;
use metadata_state::private_file::PRIVATE;

/// A file is not made larger than this, in octets (16 MiB): a guest that talks cannot fill the disk.
pub const FILE_OCTETS: u64 = 16 << 20;

/// Appends one line, on a thread where waiting for a disk holds up nobody.
pub(super) async fn append(path: &Path, line: Bytes) -> Result<(), SinkError> {
    let path = PathBuf::from(path);
    let written = tokio::task::spawn_blocking(move || append_line(&path, &line));
    written.await.map_err(|error| SinkError::File(io::Error::other(error)))?
}

/// Makes the file, with mode 0600, when there is none.
fn append_line(path: &Path, line: &[u8]) -> Result<(), SinkError> {
    let line = [line, b"\n"].concat();
    let mut options = OpenOptions::new();
    // Without O_NONBLOCK, opening a pipe that nobody reads would wait for ever.
    options.append(true).create(true).mode(PRIVATE).custom_flags(libc::O_NONBLOCK);
    let mut file = options.open(path).map_err(SinkError::File)?;
    let status = file.metadata().map_err(SinkError::File)?;
    if !status.is_file() {
        return Err(SinkError::NotAFile);
    }
    if status.len() + line.len() as u64 > FILE_OCTETS {
        return Err(SinkError::Full);
    }
    file.write_all(&line).map_err(SinkError::File)
}
