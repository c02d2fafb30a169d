//! Files that only the agent's user may read: read whole within a limit, replaced whole, removed.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, fchown};
use std::path::{Path, PathBuf};

/// The mode of files with secrets.
pub const PRIVATE: u32 = 0o600;

/// Creates a directory and its parents with mode 0700. An existing directory stays unchanged.
///
/// # Errors
/// The directory cannot be made.
pub fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Opens the file at `path`; `None` if there is none. A pipe opens at once too, with or without a writer (fifo(7)).
///
/// # Errors
/// The file exists and cannot be opened.
pub fn open(path: &Path) -> io::Result<Option<File>> {
    match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// Reads the file at `path`, at most `limit` bytes; `None` if there is none.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`] beyond the limit, or the file cannot be read.
pub fn read(path: &Path, limit: usize) -> io::Result<Option<Vec<u8>>> {
    open(path)?.map(|file| read_within(file, limit)).transpose()
}

/// Reads `from` to its end, at most `limit` bytes.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`] beyond the limit, or reading fails.
pub fn read_within(from: impl Read, limit: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take((limit as u64).saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("expected at most {limit} bytes")));
    }
    Ok(bytes)
}

/// Removes the file at `path`; returns whether there was one.
///
/// # Errors
/// The file cannot be removed.
pub fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

/// Syncs the directory of `path`, so that its list of files is on the disk.
///
/// # Errors
/// The directory cannot be opened or synced.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(directory(path))?.sync_all()
}

/// Replaces the file at `path` as a whole or not at all: writes a new file beside it with mode 0600, syncs it, and
/// renames it.
///
/// Writers of one path must take turns. The call removes the unfinished file of a writer that died.
///
/// # Errors
/// The error of the first step that fails; the file is then unchanged.
pub fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    replace_for(path, contents, None)
}

/// Like [`replace`], with an owner and group for the file.
///
/// # Errors
/// The errors of [`replace`].
pub fn replace_for(path: &Path, contents: &[u8], owner: Option<(u32, u32)>) -> io::Result<()> {
    replace_by(path, owner, |file| file.write_all(contents))
}

/// Like [`replace_for`], with a function that writes the contents piece by piece.
///
/// # Errors
/// The errors of [`replace`].
pub fn replace_by<T>(
    path: &Path,
    owner: Option<(u32, u32)>,
    write: impl FnOnce(&mut File) -> io::Result<T>,
) -> io::Result<T> {
    let aside = aside(path)?;
    remove(&aside)?;
    let written =
        write_new(&aside, owner, write).and_then(|written| fs::rename(&aside, path).map(|()| written));
    if written.is_err() {
        // Only the first error matters.
        let _ = fs::remove_file(&aside);
        return written;
    }
    sync_directory(path)?;
    written
}

/// The directory of `path`.
pub fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn aside(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidFilename))?;
    let mut aside = std::ffi::OsString::from(".");
    aside.push(name);
    aside.push(".new");
    Ok(path.with_file_name(aside))
}

fn write_new<T>(
    path: &Path,
    owner: Option<(u32, u32)>,
    write: impl FnOnce(&mut File) -> io::Result<T>,
) -> io::Result<T> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(PRIVATE).open(path)?;
    if let Some((user, group)) = owner {
        fchown(&file, Some(user), Some(group))?;
    }
    let written = write(&mut file)?;
    file.sync_all()?;
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::{read, remove, replace};
    use std::fs;
    use std::io::ErrorKind;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_file_is_replaced_whole_private_and_over_what_a_dead_writer_left() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("keys");
        fs::write(room.path().join(".keys.new"), "half").expect("written");
        for contents in ["first", "second"] {
            replace(&path, contents.as_bytes()).expect("replaced");
            assert_eq!(fs::read_to_string(&path).expect("read"), contents);
            assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o7777, 0o600);
        }
        assert_eq!(fs::read_dir(room.path()).expect("listed").count(), 1, "something was left aside");
    }

    #[test]
    fn a_write_that_fails_leaves_nothing_behind() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("keys");
        fs::create_dir(&path).expect("a directory in the way");
        replace(&path, b"x").expect_err("a directory cannot be replaced by a file");
        assert_eq!(fs::read_dir(room.path()).expect("listed").count(), 1);
    }

    #[test]
    fn a_file_is_read_up_to_its_limit_and_a_missing_one_is_no_error() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("keys");
        assert_eq!(read(&path, 4).expect("no file"), None);
        assert!(!remove(&path).expect("no file"));
        for (limit, expected) in [(5, Ok(b"first".to_vec())), (4, Err(ErrorKind::FileTooLarge))] {
            replace(&path, b"first").expect("replaced");
            assert_eq!(
                read(&path, limit).map(Option::unwrap_or_default).map_err(|error| error.kind()),
                expected
            );
        }
        assert!(remove(&path).expect("removed") && !path.exists());
    }
}
