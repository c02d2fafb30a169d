//! Files that only the agent's user may read.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, fchown};
use std::path::{Path, PathBuf};

/// The mode of files with secrets.
pub const PRIVATE: u32 = 0o600;

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
    match fs::remove_file(&aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let written =
        write_new(&aside, owner, write).and_then(|written| fs::rename(&aside, path).map(|()| written));
    if written.is_err() {
        // Only the first error matters.
        let _ = fs::remove_file(&aside);
        return written;
    }
    File::open(directory(path))?.sync_all()?;
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
    use super::replace;
    use std::fs;
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
}
