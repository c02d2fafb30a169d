//! Sinks that are files.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::SinkError;
use metadata_feed::state::private_file::PRIVATE;

/// Maximum size of a sink's file, in bytes (16 MiB), so that guests cannot fill the disk.
pub const FILE_BYTES: u64 = 16 << 20;

/// Appends one line, on a thread for blocking calls.
pub(super) async fn append(path: &Path, line: Bytes) -> Result<(), SinkError> {
    let path = PathBuf::from(path);
    let written = tokio::task::spawn_blocking(move || append_line(&path, &line));
    written.await.map_err(|error| SinkError::File(io::Error::other(error)))?
}

/// Creates the file with mode 0600 if it does not exist.
fn append_line(path: &Path, line: &[u8]) -> Result<(), SinkError> {
    let line = [line, b"\n"].concat();
    let mut options = OpenOptions::new();
    // Without O_NONBLOCK, open(2) of a FIFO without a reader waits for ever.
    options.append(true).create(true).mode(PRIVATE).custom_flags(libc::O_NONBLOCK);
    let mut file = options.open(path).map_err(SinkError::File)?;
    let status = file.metadata().map_err(SinkError::File)?;
    if !status.is_file() {
        return Err(SinkError::NotAFile);
    }
    if status.len() + line.len() as u64 > FILE_BYTES {
        return Err(SinkError::Full);
    }
    file.write_all(&line).map_err(SinkError::File)
}
