//! Reads README and book as text: pages, and the code, headings and tables of each page.

use anyhow::{Context as _, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use super::code::Code;

/// The directory of the book's pages, relative to the top of the project.
pub(crate) const SOURCE: &str = "docs/src";

/// Files outside the book that get the same checks, if they exist.
const OTHERS: [&str; 7] = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/README.md",
    crate::manifests::values::README,
    "deploy/libvirt/README.md",
    "tests/schemas/README.md",
];

/// A Markdown file.
pub(crate) struct Page {
    /// The path relative to the top of the project.
    pub(crate) path: PathBuf,
    /// Its text.
    pub(crate) text: String,
}

/// A code block between fences.
pub(crate) struct Block {
    /// The language: the word after the opening fence.
    pub(crate) language: String,
    /// The number of the block's first line, from 1.
    pub(crate) line: usize,
    /// The lines of the block, without the indentation of the fence.
    pub(crate) text: String,
}

/// Text without fenced code is searched as a whole, because a code span may continue on the next line.
impl Page {
    /// Returns the code blocks.
    pub(crate) fn blocks(&self) -> Vec<Block> {
        let mut found = Vec::new();
        let mut lines = self.text.lines().enumerate();
        while let Some((number, line)) = lines.next() {
            let Some((indent, language)) = fence(line) else { continue };
            let inner = lines.by_ref().take_while(|(_, line)| line.trim() != "```");
            let text =
                inner.map(|(_, line)| format!("{}\n", line.get(indent..).unwrap_or_default())).collect();
            found.push(Block { language: language.to_owned(), line: number + 2, text });
        }
        found
    }

    /// Returns the text with fenced blocks made blank, so that lines keep their numbers.
    pub(crate) fn prose(&self) -> String {
        let mut inside = false;
        let mut prose = String::with_capacity(self.text.len());
        for line in self.text.lines() {
            let edge = line.trim_start().starts_with("```");
            if !(inside || edge) {
                prose.push_str(line);
            }
            inside ^= edge;
            prose.push('\n');
        }
        prose
    }

    /// Returns the code spans of the prose, each with the number of the line in which it begins.
    pub(crate) fn spans(&self) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        // Paragraphs are read one by one, so that an unpaired backtick affects only its own paragraph.
        let mut line = 1;
        for paragraph in self.prose().split_inclusive("\n\n") {
            for (index, span) in paragraph.split('`').enumerate().filter(|(index, _)| index % 2 == 1) {
                let before: usize =
                    paragraph.split('`').take(index).map(|part| part.matches('\n').count()).sum();
                found.push((line + before, span.split_whitespace().collect::<Vec<_>>().join(" ")));
            }
            line += paragraph.matches('\n').count();
        }
        found
    }

    /// Returns the cells of each table row with the row's line number, without the rows of dashes.
    pub(crate) fn rows(&self) -> Vec<(usize, Vec<String>)> {
        let prose = self.prose();
        let rows =
            prose.lines().enumerate().filter(|(_, line)| line.starts_with('|') && !line.starts_with("|---"));
        rows.map(|(number, line)| (number + 1, cells(line))).collect()
    }

    /// Returns the anchors of the headings (`#name`), as GitHub and mdBook derive them.
    pub(crate) fn anchors(&self) -> Vec<String> {
        let prose = self.prose();
        let headings = prose.lines().filter(|line| line.starts_with('#'));
        let mut anchors: Vec<String> = Vec::new();
        for heading in headings {
            let name = anchor(heading.trim_start_matches('#').trim());
            let same = anchors.iter().filter(|one| **one == name).count();
            anchors.push(if same == 0 { name } else { format!("{name}-{same}") });
        }
        anchors
    }

    /// Returns `path:line`, which begins each finding.
    pub(crate) fn at(&self, line: usize) -> String {
        format!("{}:{line}", self.path.display())
    }
}

/// Returns the indentation and the language of an opening fence.
fn fence(line: &str) -> Option<(usize, &str)> {
    let text = line.trim_start();
    Some((line.len() - text.len(), text.strip_prefix("```")?.trim()))
}

/// Returns the cells of a row. `\|` does not end a cell.
fn cells(line: &str) -> Vec<String> {
    let line = line.replace("\\|", "\u{0}");
    let inner = line.trim().trim_start_matches('|').trim_end_matches('|');
    inner.split('|').map(|cell| cell.trim().replace('\u{0}', "|")).collect()
}

pub(crate) fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

/// Reads README, the book's pages and the other Markdown files of [`OTHERS`].
pub(crate) fn pages() -> Result<Vec<Page>> {
    let mut paths: Vec<PathBuf> =
        OTHERS.map(PathBuf::from).into_iter().filter(|path| shell::top().join(path).exists()).collect();
    collect(Path::new(SOURCE), "md", &mut paths)?;
    let read = |path: PathBuf| {
        let text = fs::read_to_string(shell::top().join(&path))
            .with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Page { path, text })
    };
    paths.into_iter().map(read).collect()
}

/// Adds the files below `directory` with this extension to `found`, sorted. Paths are relative to the top of the
/// project.
pub(crate) fn collect(directory: &Path, ending: &str, found: &mut Vec<PathBuf>) -> Result<()> {
    let whole = shell::top().join(directory);
    let entries = fs::read_dir(&whole).with_context(|| format!("cannot read {}", whole.display()))?;
    let mut entries: Vec<_> = entries.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = directory.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            // Cargo's build output of crates outside the workspace.
            if entry.file_name() != "target" {
                collect(&path, ending, found)?;
            }
        } else if path.extension().is_some_and(|extension| extension == ending) {
            found.push(path);
        }
    }
    Ok(())
}

// Checks that the links and anchors in README and book have targets.

/// The URLs by which pages of the built book link to files of this repository.
const REPOSITORY: [&str; 2] =
    ["https://github.com/xdp-imds/xdp-imds/blob/main/", "https://github.com/xdp-imds/xdp-imds/tree/main/"];

/// The book's table of contents.
const SUMMARY: &str = "SUMMARY.md";

/// Finds links without a target, and pages missing from the table of contents.
pub(super) fn link_findings(pages: &[Page]) -> Result<Vec<String>> {
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

// Checks that the tests and statements which the book names exist.

/// The pages with tables whose last column names tests.
const TABLES: [&str; 2] = ["docs/src/design/promises.md", "docs/src/design/threats.md"];

/// Returns the programs of tests and benches that `tests/Cargo.toml` registers.
pub(super) fn programs() -> Result<BTreeSet<String>> {
    let manifest =
        fs::read_to_string(shell::top().join("tests/Cargo.toml")).context("cannot read tests/Cargo.toml")?;
    let names = manifest.lines().filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    Ok(names.map(str::to_owned).collect())
}

/// Returns the programs and their files: `tests/PROGRAM/FILE.rs`. `house` makes sure that each file is part of one.
fn files() -> Result<BTreeSet<String>> {
    let mut known = programs()?;
    let mut of_programs = Vec::new();
    for directory in known.iter().map(|name| format!("tests/{name}")).chain(PROGRAM_TESTS.map(Into::into)) {
        if shell::top().join(&directory).is_dir() {
            collect(Path::new(&directory), "rs", &mut of_programs)?;
        }
    }
    known.extend(of_programs.iter().filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())));
    Ok(known)
}

/// The directories with tests of programs, which are not registered one by one.
const PROGRAM_TESTS: [&str; 2] = ["xtask/lab/tests", "xtask/load/tests"];

/// A reference of a table cell to a test, a module or a fuzz law.
#[derive(Debug, PartialEq, Eq)]
struct Reference {
    /// The name of a file in `tests/`, of a module, or of a fuzz law.
    subject: String,
    kind: StatementKind,
    /// The statements quoted from it.
    statements: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StatementKind {
    Test,
    Unit,
    Law,
}

/// Finds references to tests that do not exist, and statements that no test has as its name.
pub(super) fn statement_findings(pages: &[Page], code: &Code) -> Result<Vec<String>> {
    let known = files()?;
    let mut tests = sources("tests")?;
    for directory in PROGRAM_TESTS {
        tests.extend(sources(directory)?);
    }
    let mut findings = Vec::new();
    for page in pages.iter().filter(|page| TABLES.iter().any(|table| page.path == Path::new(table))) {
        let rows = page.rows();
        let mut cells: Vec<(usize, &str)> =
            rows.iter().filter_map(|(line, cells)| Some((*line, cells.last()?.as_str()))).collect();
        // A paragraph may also quote statements.
        let prose = page.prose();
        let quoted: Vec<(usize, String)> =
            paragraphs(&prose).filter(|(_, text)| text.contains("`: *")).collect();
        cells.extend(
            quoted
                .iter()
                .map(|(line, text)| (*line, text.split_once('(').map_or(text.as_str(), |(_, rest)| rest))),
        );
        for (line, cell) in cells {
            for reference in references(cell) {
                let reason = missing(&reference, &known, &tests, code);
                findings.extend(reason.into_iter().map(|reason| format!("{}: {reason}", page.at(line))));
            }
        }
    }
    Ok(findings)
}

/// Returns the parts of a reference that do not exist.
fn missing(
    reference: &Reference,
    known: &BTreeSet<String>,
    tests: &[(PathBuf, String)],
    code: &Code,
) -> Vec<String> {
    let Reference { subject, kind, statements } = reference;
    let own = |path: &Path| {
        path.iter().any(|part| Path::new(part).file_stem().is_some_and(|stem| stem == subject.as_str()))
    };
    let texts: Vec<&str> = match kind {
        StatementKind::Test if !known.contains(subject) => {
            let programs = PROGRAM_TESTS.join(" nor ");
            return vec![format!(
                "neither a program of tests/Cargo.toml nor {programs} has a file {subject}"
            )];
        }
        StatementKind::Test | StatementKind::Law => {
            tests.iter().filter(|(path, _)| own(path)).map(|(_, text)| text.as_str()).collect()
        }
        StatementKind::Unit => code.texts().filter(|(path, _)| own(path)).map(|(_, text)| text).collect(),
    };
    if texts.is_empty() {
        return vec![format!("{subject} does not exist")];
    }
    let absent = statements.iter().filter(|statement| !texts.iter().any(|text| states(text, statement)));
    absent.map(|statement| format!("no test of {subject} is named «{statement}»")).collect()
}

/// Returns true if a function in `text` has the statement as its name. `…` stands for any words.
fn states(text: &str, statement: &str) -> bool {
    let parts: Vec<String> = statement.split('…').map(slug).collect();
    let names = text.split("fn ").skip(1).filter_map(|rest| rest.split(['(', '<']).next());
    names.into_iter().any(|name| {
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return false };
        match parts.len() {
            1 => name == first,
            _ => name.starts_with(first.as_str()) && name.ends_with(last.as_str()),
        }
    })
}

/// Returns the function name of a statement.
fn slug(statement: &str) -> String {
    let kept = statement.trim().chars().filter(|c| !matches!(c, '\'' | '’' | ',' | '.'));
    kept.map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' }).collect()
}

/// Returns the references of a cell: `` `test`: *statement*, *statement*; unit tests of `module`: … ``.
fn references(cell: &str) -> Vec<Reference> {
    let mut found: Vec<Reference> = Vec::new();
    for segment in cell.split(';') {
        let kind = match segment.trim() {
            text if text.starts_with("unit tests of") => StatementKind::Unit,
            text if text.starts_with("fuzz law") => StatementKind::Law,
            _ => StatementKind::Test,
        };
        // Text in brackets comments on a test and is no reference.
        let segment = segment.split('(').next().unwrap_or_default();
        let mut rest = segment;
        while let Some(at) = rest.find(['`', '*']) {
            let mark = &rest[at..=at];
            let Some((inner, after)) = rest[at + 1..].split_once(mark) else { break };
            match (mark, found.last_mut()) {
                ("`", _) if inner.contains(' ') => {}
                ("`", _) => found.push(Reference { subject: inner.to_owned(), kind, statements: Vec::new() }),
                (_, Some(reference)) => reference.statements.push(inner.to_owned()),
                (_, None) => {}
            }
            rest = after;
        }
    }
    found
}

/// Returns the paragraphs that are not tables, each as one line, with the number of its first line.
fn paragraphs(prose: &str) -> impl Iterator<Item = (usize, String)> {
    let mut line = 1;
    prose.split_inclusive("\n\n").filter_map(move |paragraph| {
        let first = line;
        line += paragraph.matches('\n').count();
        (!paragraph.contains("|---")).then(|| (first, paragraph.replace('\n', " ")))
    })
}

/// Reads the Rust files below a directory, with paths relative to the top of the project.
fn sources(directory: &str) -> Result<Vec<(PathBuf, String)>> {
    let mut paths = Vec::new();
    collect(Path::new(directory), "rs", &mut paths)?;
    let read = |path: PathBuf| Ok((path.clone(), fs::read_to_string(shell::top().join(path))?));
    paths.into_iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::{Page, Reference, StatementKind, anchor, broken, cells, links, references, states};

    fn page(text: &str) -> Page {
        Page { path: "a.md".into(), text: text.to_owned() }
    }

    #[test]
    fn blocks_are_found_with_language_line_and_without_indentation() {
        let page =
            page("a\n```yaml\nb: 1\n```\n```sh\nc\n```\n- d\n  ```yaml\n  e:\n    f: 2\n\n  g: 3\n  ```\n");
        let blocks: Vec<_> = page.blocks().into_iter().map(|b| (b.language, b.line, b.text)).collect();
        let expected = [("yaml", 3, "b: 1\n"), ("sh", 6, "c\n"), ("yaml", 10, "e:\n  f: 2\n\ng: 3\n")];
        assert_eq!(blocks, expected.map(|(language, line, text)| (language.into(), line, text.into())));
    }

    #[test]
    fn spans_are_found_over_lines_and_not_in_blocks() {
        let page = page("a `b\nc` d\n\n```sh\n`e`\n```\n\n`f` g\n");
        assert_eq!(page.spans(), [(1, "b c".into()), (8, "f".into())]);
    }

    #[test]
    fn a_row_is_split_into_cells_but_not_at_an_escaped_bar() {
        assert_eq!(cells(r"| a | `b \| c` |"), ["a", "`b | c`"]);
    }

    #[test]
    fn headings_become_the_anchors_that_renderers_make() {
        for (heading, name) in [("VMs on passt", "vms-on-passt"), ("`a.b[]`", "ab"), ("It's: a-b", "its-a-b")]
        {
            assert_eq!(anchor(heading), name);
        }
        assert_eq!(page("# A\n## A\n").anchors(), ["a", "a-1"]);
    }

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

    #[test]
    fn a_cell_refers_to_tests_modules_and_statements() {
        let reference = |subject: &str, kind, statements: &[&str]| Reference {
            subject: subject.into(),
            kind,
            statements: statements.iter().map(ToString::to_string).collect(),
        };
        let cell = "`a`: *b c*, *d…*; unit tests of `e`; fuzz law `f`; `g`, `cargo xtask h` (see `i`)";
        let expected = [
            reference("a", StatementKind::Test, &["b c", "d…"]),
            reference("e", StatementKind::Unit, &[]),
            reference("f", StatementKind::Law, &[]),
            reference("g", StatementKind::Test, &[]),
        ];
        assert_eq!(references(cell), expected);
    }

    #[test]
    fn a_statement_is_the_name_of_a_function() {
        let text = "#[test]\nfn another_guests_ip_address_changes_nothing() {}\nfn no_wrapping_of_it_leaves_the_tap() {}";
        for (statement, there) in [
            ("another guest's IP address changes nothing", true),
            ("another guest's IP…", true),
            ("no wrapping…leaves the tap", true),
            ("no wrapping…leaves the node", false),
            ("another guest", false),
        ] {
            assert_eq!(states(text, statement), there, "{statement}");
        }
    }
}
