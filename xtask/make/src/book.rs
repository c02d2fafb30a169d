//! `cargo xtask book`: writes the pages that are generated from code, checks all pages against the code, and builds the
//! book.

mod code;
mod help;
mod markdown;
mod types;

pub(crate) use markdown::plain;

use anyhow::{Context as _, Result, bail};
use code::Code;
use markdown::Page;
use metadata_content::dialect;
use metadata_content::dialect::{AccessCondition, Description, Mount, PATIENCE};
use metadata_content::record::{Dialect, Smbios};
use metadata_content::store::Host;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::manifests::values;

/// The command that installs mdBook. Its version is fixed, so that every build of the book looks the same.
const MDBOOK: &str = "cargo install --locked mdbook@0.5.4 --no-default-features --features search";

/// The options of `cargo xtask book`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write nothing, and fail if a generated page differs from the code
    #[arg(long)]
    check: bool,
    /// The agent for the help pages and for checking the samples; by default it is built
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

/// Runs every check, even after a finding, so that one run shows all findings.
pub(crate) fn run(args: &Args) -> Result<()> {
    let agent = match &args.agent {
        Some(agent) => agent.clone(),
        None => {
            shell::run(&mut shell::tested_agent())?;
            shell::target().join("debug/xdp-imds")
        }
    };
    let programs = help::Programs { agent, xtask: shell::target().join("debug/xtask") };
    let code = Code::read()?;
    let mut findings = generate(&code, &programs, args.check)?;
    let pages = markdown::pages()?;
    findings.extend(help::command_findings(&pages, &programs)?);
    findings.extend(help::findings(&pages, &programs.agent)?);
    findings.extend(of_text(&pages, &code)?);
    for finding in &findings {
        eprintln!("{finding}");
    }
    build()?;
    if findings.is_empty() { Ok(()) } else { bail!("{} findings in README and book", findings.len()) }
}

/// Runs the checks that start no program.
fn of_text(pages: &[Page], code: &Code) -> Result<Vec<String>> {
    let mut findings = markdown::link_findings(pages)?;
    findings.extend(markdown::statement_findings(pages, code)?);
    findings.extend(limit_findings(pages, code));
    findings.extend(metric_findings(pages, code));
    findings.extend(help::unshown(pages));
    Ok(findings)
}

/// Writes the generated pages, or with `check` finds those that differ.
fn generate(code: &Code, programs: &help::Programs, check: bool) -> Result<Vec<String>> {
    let made = [
        ("reference/command.md", help::agent(programs)?),
        ("contribute/xtask.md", help::xtask(programs)?),
        ("reference/configuration-fields.md", types::configuration(code)?),
        ("reference/record-fields.md", types::record(code)?),
        ("reference/http-api.md", types::openapi_page(code)?),
        (DIALECTS, dialects_page()?),
    ];
    let made = made.map(|(name, text)| (format!("{}/{name}", markdown::SOURCE), text)).into_iter();
    // The chart's README is a page that is not in the book.
    let made = made.chain([(values::README.to_owned(), values::readme()?)]);
    let mut findings = Vec::new();
    for (name, text) in made {
        let path = shell::top().join(name);
        if check {
            let committed = fs::read_to_string(&path).unwrap_or_default();
            if let Some(line) = difference(&committed, &text) {
                let path = path.strip_prefix(shell::top())?.display();
                findings.push(format!(
                    "{path}:{line}: differs from the code; run `cargo xtask book` and commit the page"
                ));
            }
        } else {
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    Ok(findings)
}

/// Returns the number of the first line in which two texts differ, from 1.
fn difference(one: &str, other: &str) -> Option<usize> {
    if one == other {
        return None;
    }
    let same = one.lines().zip(other.lines()).take_while(|(one, other)| one == other).count();
    Some(same + 1)
}

/// Builds the book below `target`.
fn build() -> Result<()> {
    let Some(mdbook) = shell::which("mdbook") else { bail!("mdbook is missing; run `{MDBOOK}`") };
    shell::run(Command::new(mdbook).args(["build", "docs"]).current_dir(shell::top()))
}

// Checks that the agent has the metrics that README and book name.

const PREFIX: &str = "xdp_imds_";

/// The prefix of the TCP stack's counters. The sources hold only the rest of these names as strings.
const STACK: &str = "xdp_imds_stack_";

/// Finds metrics that no source file names.
fn metric_findings(pages: &[Page], code: &Code) -> Vec<String> {
    let mut findings = Vec::new();
    for page in pages {
        for (line, span) in page.spans() {
            let missing = names(&span).filter(|name| !known(name, code));
            findings.extend(missing.map(|name| format!("{}: the agent has no metric {name}", page.at(line))));
        }
    }
    findings
}

fn names(span: &str) -> impl Iterator<Item = &str> {
    let words = span.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with(PREFIX) && word.len() > PREFIX.len())
}

fn known(name: &str, code: &Code) -> bool {
    let quoted = match name.strip_prefix(STACK) {
        Some(rest) => format!("\"{}\"", rest.strip_suffix("_total").unwrap_or(rest)),
        None => format!("\"{name}\""),
    };
    code.texts().any(|(_, text)| text.contains(&quoted))
}

// Checks that each row of the limits page states the value of the constant it names.

const LIMITS: &str = "docs/src/reference/limits.md";

/// Finds constants that do not exist, and rows that do not state the value of their constant.
fn limit_findings(pages: &[Page], code: &Code) -> Vec<String> {
    let mut findings = Vec::new();
    let Some(page) = pages.iter().find(|page| page.path == Path::new(LIMITS)) else {
        return vec![format!("{LIMITS} is missing")];
    };
    for (line, cells) in page.rows() {
        let [what, limit, beyond, constants] = cells.as_slice() else { continue };
        let stated = format!("{what} {limit} {beyond}");
        for name in constants.split('`').skip(1).step_by(2) {
            let reason = match code.constant(name) {
                Ok(value) if value.forms().iter().any(|form| has(&stated, form)) => continue,
                Ok(value) => {
                    format!("the row does not state {name}, which is {}", value.forms().join(" or "))
                }
                Err(error) => format!("{error:#}"),
            };
            findings.push(format!("{}: {reason}", page.at(line)));
        }
    }
    findings
}

/// Returns true if a text has `form`, and not as part of a longer number.
fn has(text: &str, form: &str) -> bool {
    text.match_indices(form).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let mut after = text[at + form.len()..].chars();
        let next = after.next();
        let goes_on = matches!(next, Some(',' | '.')) && after.next().is_some_and(|c| c.is_ascii_digit());
        !before.is_some_and(|c| c.is_ascii_digit() || c == ',' || c == '.')
            && !goes_on
            && !next.is_some_and(|c| c.is_ascii_digit())
    })
}

// The table of dialects, and the names that come from it.

/// The page with the table, below the book's source.
const DIALECTS: &str = "reference/dialects.md";
/// The lines around the table.
const BEGIN: &str =
    "<!-- Generated by `cargo xtask book` from the descriptions in `content/src/dialect`; edit those. -->";
const END: &str = "<!-- End of what is generated. -->";

/// The words of a type that is defined by the table of dialects and not by variants in the source.
fn words(name: &str) -> Option<Vec<&'static str>> {
    match name {
        "Dialect" => Some(Dialect::ALL.iter().map(|dialect| dialect.as_str()).collect()),
        "Smbios" => Some(Smbios::all().to_vec()),
        _ => None,
    }
}

/// The page as it is committed, with the table made anew.
fn dialects_page() -> Result<String> {
    let path = shell::top().join(markdown::SOURCE).join(DIALECTS);
    let committed = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    around(&committed, &table()?)
        .with_context(|| format!("{}: the lines around the table are missing", path.display()))
}

/// Replaces what is between [`BEGIN`] and [`END`].
fn around(page: &str, table: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

fn table() -> Result<String> {
    let mut table =
        String::from("| Dialect | Paths | A request needs | Waits | Tested with |\n|---|---|---|---|---|\n");
    for (names, description) in dialect::all() {
        let titles: Vec<_> = names.iter().map(|name| name.title()).collect();
        let Description { remark, clients, .. } = description;
        let between = if remark.is_empty() { "" } else { "; " };
        writeln!(
            table,
            "| {} | {}{between}{remark} | {} | {} | {clients} |",
            titles.join(", "),
            paths(description.mounts),
            needs(description.mounts),
            waits(description.mounts),
        )?;
    }
    Ok(table)
}

/// The mounts, those of one host behind its name.
fn paths(mounts: &[Mount]) -> String {
    let mut text = String::new();
    let mut host = Host::Metadata;
    for mount in mounts {
        if !text.is_empty() {
            text += ", ";
        }
        if mount.host != host {
            host = mount.host;
            text += &format!("{}: ", host.authority());
        }
        text += &format!("`{}`", mount.path);
    }
    text
}

/// The access rules, each once.
fn needs(mounts: &[Mount]) -> String {
    let rule = |mount: &Mount| match mount.access {
        AccessCondition::Open => None,
        AccessCondition::Field(name, value) => Some(format!("`{name}: {value}`")),
        AccessCondition::Token(name) => Some(format!("a token in `{name}`")),
        AccessCondition::Imdsv2(name) => {
            Some(format!("a token in `{name}`, if `serve.imdsv2` is `required`"))
        }
        AccessCondition::LowPort => Some("a source port below 1024 for user-data and vendor-data".to_owned()),
        AccessCondition::Signature => {
            Some("an OAuth signature, if the record has `credentials.maas`".to_owned())
        }
    };
    let mut rules: Vec<String> = mounts.iter().filter_map(rule).collect();
    rules.dedup();
    rules.join(", ")
}

/// How long a request waits for its record.
fn waits(mounts: &[Mount]) -> String {
    let other = mounts.iter().map(|mount| mount.patience).find(|patience| *patience != PATIENCE);
    format!("{} s", other.unwrap_or(PATIENCE).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use metadata_content::record::Dialect;

    use super::{BEGIN, Code, END, around, difference, has, markdown, of_text, table};

    #[test]
    fn links_statements_limits_and_metrics_of_the_book_hold() {
        let findings =
            of_text(&markdown::pages().expect("pages"), &Code::read().expect("sources")).expect("judged");
        assert!(findings.is_empty(), "{}", findings.join("\n"));
    }

    #[test]
    fn readme_has_at_most_200_lines() {
        let readme = std::fs::read_to_string(shell::top().join("README.md")).expect("README");
        assert!(readme.lines().count() <= 200, "{} lines", readme.lines().count());
    }

    #[test]
    fn a_difference_is_named_by_its_line() {
        let cases = [
            ("a\nb\n", "a\nb\n", None),
            ("a\nb\n", "a\nc\n", Some(2)),
            ("a\n", "a\nb\n", Some(2)),
            ("", "a", Some(1)),
        ];
        for (one, other, line) in cases {
            assert_eq!(difference(one, other), line, "{one:?} {other:?}");
        }
    }

    #[test]
    fn a_form_inside_a_longer_number_does_not_count() {
        for (text, form, there) in [
            ("16,384 each", "16,384", true),
            ("116,384", "16,384", false),
            ("128; 64", "128", true),
            ("1,128,5", "128", false),
        ] {
            assert_eq!(has(text, form), there, "{text}");
        }
    }

    #[test]
    fn the_table_names_every_dialect_and_replaces_the_one_before() {
        let table = table().expect("a table");
        for dialect in Dialect::ALL {
            assert!(table.contains(dialect.title()), "{dialect:?}");
        }
        let page = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let made = around(&page, &table).expect("a page");
        assert!(made.starts_with("a\n") && made.ends_with("\nb\n") && !made.contains("old"), "{made}");
        assert_eq!(around(&made, &table).as_deref(), Some(made.as_str()));
        assert_eq!(around("no lines\n", &table), None);
    }
}
