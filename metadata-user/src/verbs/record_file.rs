//! The record that a verb takes from one file.

use std::path::Path;

use anyhow::{Context as _, bail};
use metadata_content::record::{Record, RecordLimits, Warning};
use metadata_feed::directory;

/// Reads a record and the files that it names, within `limits`.
///
/// # Errors
/// The path is no file, or the record is invalid.
pub(super) fn load(path: &Path, limits: &RecordLimits) -> anyhow::Result<(Record, Vec<Warning>)> {
    let shown = path.display();
    let reading = || format!("cannot read the record {shown}");
    if std::fs::metadata(path).with_context(reading)?.is_dir() {
        bail!("expected the file of one record, found the directory {shown}; name a file in it");
    }
    let (dir, names) = directory::files(path)?;
    let loaded = names.first().and_then(|name| directory::load(&dir, name, limits));
    // It was there a moment ago.
    Ok(loaded.with_context(reading)?.record?)
}
