//! Checks that the links and anchors in README and book have targets.

use super::markdown::{Page, SOURCE};
use anyhow::Result;
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

/// The URLs by which pages of the built book link to files of this repository.
const REPOSITORY: [&str; 2] =
    ["https://github.com/xdp-imds/xdp-imds/blob/main/", "https://github.com/xdp-imds/xdp-imds/tree/main/"];

/// The book's table of contents.
const SUMMARY: &str = "SUMMARY.md";

/// Finds links without a target, and pages missing from the table of contents.
pub(super) fn findings(pages: &[Page]) -> Result<Vec<String>> {
    let anchors: BTreeMap<&Path, Vec<String>> =
        pages.iter().map(|page| (page.path.as_path(), page.anchors())).collect();
    let mut findings = Vec::new();
    for page in pages {
        for (line, target) in links(&page.prose()) {
            if let Some(reason) = broken(&page.path, &target, &anchors) {
                findings.push(format!("{}: {target}: {reason}", page.at(line)));
            }
        }
    }
    findings.extend(unlisted(pages));
    Ok(findings)
}

/// Returns the reason for which a link has no target.
fn broken(page: &Path, target: &str, anchors: &BTreeMap<&Path, Vec<String>>) -> Option<String> {
    let (place, name) = target.split_once('#').map_or((target, None), |(place, name)| (place, Some(name)));
    let inside = REPOSITORY.iter().find_map(|start| place.strip_prefix(start));
    let path = match inside {
        Some(path) => PathBuf::from(path),
        None if place.contains("://") || place.starts_with("mailto:") => return None,
        None if place.is_empty() => page.to_owned(),
        None => plain(&page.parent().unwrap_or(Path::new("")).join(place)),
    };
    if !shell::top().join(&path).exists() {
        return Some(format!("there is no {}", path.display()));
    }
    // The built book has no files from outside its source directory.
    if inside.is_none() && page.starts_with(SOURCE) && !path.starts_with(SOURCE) {
        return Some(format!("the file is outside the book; write {}{}", REPOSITORY[0], path.display()));
    }
    let name = name?;
    match anchors.get(path.as_path()) {
        None => Some(format!("the headings of {} are not checked; link without an anchor", path.display())),
        Some(known) if known.iter().any(|one| one == name) => None,
        Some(_) => Some(format!("no heading of {} has that name", path.display())),
    }
}

/// Returns a path without `.` and `..`.
pub(crate) fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

/// Returns the line and target of each inline link and picture. Code spans are ignored.
fn links(prose: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose.lines().enumerate() {
        let without_code: String =
            line.split('`').enumerate().filter(|(index, _)| index % 2 == 0).map(|(_, part)| part).collect();
        for part in without_code.split("](").skip(1) {
            if let Some((target, _)) = part.split_once(')') {
                found.push((number + 1, target.to_owned()));
            }
        }
    }
    found
}

/// Finds pages missing from the table of contents.
fn unlisted(pages: &[Page]) -> Vec<String> {
    let source = Path::new(SOURCE);
    let Some(summary) = pages.iter().find(|page| page.path == source.join(SUMMARY)) else {
        return vec![format!("{SOURCE}/{SUMMARY} is missing")];
    };
    let listed: Vec<PathBuf> =
        links(&summary.text).into_iter().map(|(_, target)| source.join(target)).collect();
    let mine =
        pages.iter().map(|page| &page.path).filter(|path| path.starts_with(source) && **path != summary.path);
    let left_out = mine.filter(|path| !listed.contains(path));
    left_out.map(|path| format!("{}: {SUMMARY} does not list it", path.display())).collect()
}

#[cfg(test)]
mod tests {
    use super::{broken, links};
    use std::collections::BTreeMap;
    use std::path::Path;

    #[test]
    fn links_and_pictures_are_found_and_links_in_code_are_not() {
        let text = "a [b](c.md#d) ![e](f.svg)\n`[g](h)` [`i`](j.md)\n";
        assert_eq!(links(text), [(1, "c.md#d".into()), (1, "f.svg".into()), (2, "j.md".into())]);
    }

    #[test]
    fn a_link_without_a_target_is_found() {
        let anchors = BTreeMap::from([(Path::new("README.md"), vec!["try-it".to_owned()])]);
        let book = Path::new("docs/src/operate/api.md");
        let good = [
            "https://example.com/x",
            "sources.md",
            "https://github.com/xdp-imds/xdp-imds/blob/main/README.md#try-it",
        ];
        for target in good {
            assert_eq!(broken(book, target, &anchors), None, "{target}");
        }
        let bad = [
            "nowhere.md",
            "../../../README.md",
            "https://github.com/xdp-imds/xdp-imds/blob/main/no.md",
            "sources.md#x",
        ];
        for target in bad {
            assert!(broken(book, target, &anchors).is_some(), "{target}");
        }
        assert!(broken(Path::new("README.md"), "#try-that", &anchors).is_some());
    }
}
