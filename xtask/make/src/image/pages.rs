//! Manual pages and completions for packages, which the agent itself writes, and the documents beside them.

use super::documents;
use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lets an agent write its pages to the directory `pages` below `products`, and returns that directory. Manual pages
/// are compressed, as distributions require. The documents are in `doc` below it.
pub(crate) fn write(agent: &Path, products: &Path) -> Result<PathBuf> {
    let pages = products.join("pages");
    if pages.is_dir() {
        // A verb may have another name now.
        fs::remove_dir_all(&pages).with_context(|| format!("cannot remove {}", pages.display()))?;
    }
    shell::run(Command::new(agent).arg("pages").arg(&pages).env_remove("XDP_IMDS_LOG"))?;
    let manual = pages.join("man1");
    for file in fs::read_dir(&manual).with_context(|| format!("cannot list {}", manual.display()))? {
        compress(&file?.path())?;
    }
    documents::write(shell::top(), &pages.join("doc"))?;
    Ok(pages)
}

/// Replaces a file by its compressed form, whose bytes depend on the content alone.
fn compress(path: &Path) -> Result<()> {
    let bytes = fs::read(path)?;
    let mut gzip = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    gzip.write_all(&bytes)?;
    let name = format!("{}.gz", path.display());
    fs::write(&name, gzip.finish()?).with_context(|| format!("cannot write {name}"))?;
    Ok(fs::remove_file(path)?)
}

#[cfg(test)]
mod tests {
    use super::compress;
    use std::fs;
    use std::io::Read as _;

    #[test]
    fn a_compressed_page_takes_the_place_of_the_page() {
        let room = tempfile::tempdir().expect("a directory");
        let page = room.path().join("a.1");
        fs::write(&page, "text").expect("written");
        compress(&page).expect("compressed");
        assert!(!page.exists());
        let bytes = fs::read(room.path().join("a.1.gz")).expect("a file");
        // RFC 1952 §2.3: no name, no time, slowest and best compression.
        assert_eq!(bytes[3..9], [0, 0, 0, 0, 0, 2]);
        let mut text = String::new();
        flate2::read::GzDecoder::new(&*bytes).read_to_string(&mut text).expect("gzip");
        assert_eq!(text, "text");
    }
}
