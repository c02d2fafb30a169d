//! Checks the crate table of the architecture page against the manifests.

use super::markdown::Page;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const PAGE: &str = "docs/src/design/architecture.md";

/// The directories of crates, and the prefixes of package names.
const PLACES: [&str; 2] = ["", "metadata-user"];
const PREFIXES: [&str; 3] = ["metadata-", "xdp-imds-", "imds-"];

/// Finds crates whose dependencies on each other differ from their row, and crates that depend on a package their row
/// forbids.
pub(super) fn findings(pages: &[Page]) -> Vec<String> {
    let Some(page) = pages.iter().find(|page| page.path == Path::new(PAGE)) else {
        return vec![format!("{PAGE} is missing")];
    };
    let rows: Vec<_> = page.rows().into_iter().filter(|(_, cells)| cells.len() == 4).collect();
    let crates: BTreeSet<String> = rows.iter().flat_map(|(_, cells)| spans(&cells[0])).collect();
    let mut findings = unshown(&crates);
    for (line, cells) in &rows {
        let Some(name) = spans(&cells[0]).pop_first() else { continue };
        let manifest = PLACES.iter().find_map(|place| {
            fs::read_to_string(shell::top().join(place).join(&name).join("Cargo.toml")).ok()
        });
        // A planned crate has no manifest to compare with.
        let Some(manifest) = manifest else { continue };
        let found = dependencies(&manifest);
        let own: BTreeSet<String> = found.iter().filter_map(|dependency| ours(dependency, &crates)).collect();
        let (shown, never) = (spans(&cells[1]), spans(&cells[2]));
        let at = page.at(*line);
        findings.extend(
            own.difference(&shown)
                .map(|one| format!("{at}: {name} depends on {one}, which its row does not show")),
        );
        let planned = |one: &&String| {
            PLACES.iter().any(|place| shell::top().join(place).join(one).join("Cargo.toml").exists())
        };
        findings.extend(
            shown
                .difference(&own)
                .filter(planned)
                .map(|one| format!("{at}: {name} does not depend on {one}")),
        );
        findings.extend(
            found.intersection(&never).map(|one| format!("{at}: {name} names {one}, which it must not")),
        );
    }
    findings
}

/// Finds crates of user space that have no row.
fn unshown(crates: &BTreeSet<String>) -> Vec<String> {
    let place = shell::top().join("metadata-user");
    let entries = fs::read_dir(place).into_iter().flatten().flatten();
    let there = entries.filter(|entry| entry.path().join("Cargo.toml").exists());
    let names = there.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| !crates.contains(name)).map(|name| format!("{PAGE}: {name} has no row")).collect()
}

/// Returns the directory of the project's crate that a dependency names, if it names one.
fn ours(dependency: &str, crates: &BTreeSet<String>) -> Option<String> {
    let short = PREFIXES.iter().filter_map(|prefix| dependency.strip_prefix(prefix));
    std::iter::once(dependency).chain(short).find(|name| crates.contains(*name)).map(str::to_owned)
}

/// Returns the names in `[dependencies]`, without those in development and build dependencies.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let lines = manifest.lines().map(str::trim).skip_while(|line| *line != "[dependencies]").skip(1);
    let names = lines.take_while(|line| !line.starts_with('[')).filter(|line| !line.starts_with('#'));
    names
        .filter_map(|line| line.split(['=', '.', ' ']).next())
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

fn spans(cell: &str) -> BTreeSet<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::{dependencies, ours};
    use std::collections::BTreeSet;

    #[test]
    fn dependencies_are_those_of_the_crate_itself() {
        let manifest = "[package]\nname = \"a\"\n\n[dependencies]\n# why\nb.workspace = true\nc = { path = \"c\" }\n\n[dev-dependencies]\nd = \"1\"\n";
        assert_eq!(dependencies(manifest), BTreeSet::from(["b".to_owned(), "c".to_owned()]));
    }

    #[test]
    fn a_dependency_is_matched_to_the_directory_of_its_crate() {
        let crates = BTreeSet::from(["content".to_owned(), "metadata-common".to_owned()]);
        for (dependency, known) in [
            ("metadata-content", Some("content")),
            ("metadata-common", Some("metadata-common")),
            ("serde", None),
        ] {
            assert_eq!(ours(dependency, &crates).as_deref(), known, "{dependency}");
        }
    }
}
