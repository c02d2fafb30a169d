//! Writes the Helm chart as the archive that `helm package` would write, but the same whenever it is made.

use super::VERSION;
use crate::image::layer::{self, Entry};
use crate::image::layout::About;
use crate::manifests::CHART;
use anyhow::{Context as _, Result};
use std::fs;
use std::path::Path;

/// The directory of all files in the archive, which Helm wants to be the chart's name.
const NAME: &str = "xdp-imds";

/// Writes the chart of a source tree to `out`.
pub(super) fn make(top: &Path, about: &About, out: &Path) -> Result<()> {
    let path = out.join(format!("{NAME}-{VERSION}.tgz"));
    fs::write(&path, layer::write(entries(&top.join(CHART))?, about.epoch())?.gzip)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Returns the files below a chart's directory.
fn entries(chart: &Path) -> Result<Vec<Entry>> {
    let (mut places, mut entries) = (vec![chart.to_owned()], Vec::new());
    while let Some(place) = places.pop() {
        for file in fs::read_dir(&place).with_context(|| format!("cannot list {}", place.display()))? {
            let path = file?.path();
            if path.is_dir() {
                places.push(path);
                continue;
            }
            let name = format!("{NAME}/{}", path.strip_prefix(chart)?.to_string_lossy());
            let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            entries.push(Entry::file(&name, bytes));
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::{entries, layer};
    use crate::manifests::CHART;
    use std::collections::BTreeSet;

    #[test]
    fn the_archive_has_every_file_of_the_chart_below_its_name() {
        let entries = entries(&shell::top().join(CHART)).expect("files");
        let written = layer::write(entries, 7).expect("an archive");
        let mut archive = tar::Archive::new(&*written.tar);
        let path = |entry: std::io::Result<tar::Entry<'_, &[u8]>>| {
            entry.expect("an entry").path().expect("a path").to_string_lossy().into_owned()
        };
        let found: BTreeSet<_> = archive.entries().expect("entries").map(path).collect();
        for name in ["Chart.yaml", "README.md", "values.schema.json", "templates/daemonset.yaml"] {
            assert!(found.contains(&format!("xdp-imds/{name}")), "{name}: {found:?}");
        }
        assert!(found.iter().all(|path| path.starts_with("xdp-imds/")), "{found:?}");
    }
}
