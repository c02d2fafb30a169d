//! Checks that the tests and statements which the book names exist.

use super::code::Code;
use super::markdown::{self, Page};
use anyhow::{Context as _, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

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
            markdown::collect(Path::new(&directory), "rs", &mut of_programs)?;
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
    kind: Kind,
    /// The statements quoted from it.
    statements: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Test,
    Unit,
    Law,
}

/// Finds references to tests that do not exist, and statements that no test has as its name.
pub(super) fn findings(pages: &[Page], code: &Code) -> Result<Vec<String>> {
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
        Kind::Test if !known.contains(subject) => {
            let programs = PROGRAM_TESTS.join(" nor ");
            return vec![format!(
                "neither a program of tests/Cargo.toml nor {programs} has a file {subject}"
            )];
        }
        Kind::Test | Kind::Law => {
            tests.iter().filter(|(path, _)| own(path)).map(|(_, text)| text.as_str()).collect()
        }
        Kind::Unit => code.texts().filter(|(path, _)| own(path)).map(|(_, text)| text).collect(),
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
            text if text.starts_with("unit tests of") => Kind::Unit,
            text if text.starts_with("fuzz law") => Kind::Law,
            _ => Kind::Test,
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
    markdown::collect(Path::new(directory), "rs", &mut paths)?;
    let read = |path: PathBuf| Ok((path.clone(), fs::read_to_string(shell::top().join(path))?));
    paths.into_iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::{Kind, Reference, references, states};

    #[test]
    fn a_cell_refers_to_tests_modules_and_statements() {
        let reference = |subject: &str, kind, statements: &[&str]| Reference {
            subject: subject.into(),
            kind,
            statements: statements.iter().map(ToString::to_string).collect(),
        };
        let cell = "`a`: *b c*, *d…*; unit tests of `e`; fuzz law `f`; `g`, `cargo xtask h` (see `i`)";
        let expected = [
            reference("a", Kind::Test, &["b c", "d…"]),
            reference("e", Kind::Unit, &[]),
            reference("f", Kind::Law, &[]),
            reference("g", Kind::Test, &[]),
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
