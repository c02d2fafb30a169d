//! Reads README and book as text: pages, and the code, headings and tables of each page.

use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};

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

/// Returns the anchor of a heading.
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

#[cfg(test)]
mod tests {
    use super::{Page, anchor, cells};

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
}
