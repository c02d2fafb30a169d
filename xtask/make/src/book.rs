//! `cargo xtask book`: writes the pages that are generated from code, checks all pages against the code, and builds the
//! book.

mod code;
mod commands;
mod dialects;
mod help;
mod limits;
mod links;
mod markdown;
mod metrics;
mod openapi;
mod statements;
mod types;

use crate::manifests::values;
use anyhow::{Context as _, Result, bail};
use code::Code;
pub(crate) use links::plain;
use markdown::Page;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

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
    findings.extend(commands::findings(&pages, &programs)?);
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
    let mut findings = links::findings(pages)?;
    findings.extend(statements::findings(pages, code)?);
    findings.extend(limits::findings(pages, code));
    findings.extend(metrics::findings(pages, code));
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
        ("reference/http-api.md", openapi::page(code)?),
        (dialects::PAGE, dialects::page()?),
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

#[cfg(test)]
mod tests {
    use super::{Code, difference, markdown, of_text};

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
}
